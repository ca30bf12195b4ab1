"""Training in the process that calls fit(): num_workers=0, and under torchrun.

Runs in: the user's process.
"""
