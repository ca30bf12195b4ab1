"""Training in the process that calls fit(): num_workers=0, and under other launchers.

Runs in: the user's process.
"""
