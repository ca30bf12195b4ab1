"""Start training from the command line: options, targets, checks of hosts.

Runs in: the user's process.
"""
