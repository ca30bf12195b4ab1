"""What keeps a run from making progress: slow ranks, hangs, and collectives that do not match. Runs in: coordinator.

Pure: no I/O, no clock.
"""
