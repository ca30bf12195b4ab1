"""The command line: python -m distrain.launch, with its checks of hosts.

Runs in: the user's process.
"""
