"""The command line: distrain, and python -m distrain.launch, with its checks of hosts.

Runs in: the user's process.
"""
