"""Start training from the command line: options, the config file, targets, checks of hosts.

Runs in: the user's process.
"""
