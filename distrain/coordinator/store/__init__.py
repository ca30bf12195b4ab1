"""Writing the run directory: only the coordinator commits and deletes checkpoints. Runs in: coordinator."""
