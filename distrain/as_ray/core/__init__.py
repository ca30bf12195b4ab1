"""Ray's tasks and actors, which run in place, and its cluster, which is this machine. Runs in: anywhere."""
