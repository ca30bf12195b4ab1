"""Reports of a rank: checked arguments, metrics, and checkpoints in memory or in a shared directory.

Runs in: worker.
"""
