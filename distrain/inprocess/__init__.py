"""Training without processes of ours: num_workers=0, and under torchrun.

Runs in: the user's process.
"""
