"""Start training from the command line: options, targets, checks of hosts, jobs of Slurm.

Runs in: the user's process.
"""
