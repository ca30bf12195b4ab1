"""The state machine of a run, and the smaller machines that it asks. Runs in: coordinator.

Pure: no I/O, no clock.
"""
