"""Ray Tune: search spaces, and a Tuner whose trials are runs. Runs in: coordinator, and worker."""
