"""What people see of a run on the console: the output of the ranks, and how far the run is. Runs in: coordinator."""
