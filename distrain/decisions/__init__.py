"""Everything that is decided about a run: states, placement, restarts, blame, when a checkpoint is complete.

Pure: no I/O, no clock, no threads. Facts go in, actions come out. Runs in: coordinator.
"""
