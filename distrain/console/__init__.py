"""The console of a run: the output of the ranks, and how far the run is. Runs in: coordinator."""
