"""Train in processes that were not started by distrain: under other launchers, and with num_workers=0.

Runs in: the user's process.
"""
