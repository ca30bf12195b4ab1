"""How a run goes on after a failure: what it waits for, whether it restarts, and where. Runs in: coordinator.

Pure: no I/O, no clock.
"""
