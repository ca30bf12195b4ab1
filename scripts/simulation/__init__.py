"""Parts of scripts/simulate: the simulated hosts, and the run without processes."""
