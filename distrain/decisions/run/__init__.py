"""What happens next in a run: its state machine, and the machines that this one asks. Runs in: coordinator.

Pure: no I/O, no clock.
"""
