"""One run in its directory, with its run.json, and the error that it ends with. Runs in: coordinator."""
