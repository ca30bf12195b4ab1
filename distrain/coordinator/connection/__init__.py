"""The connections to the agents of all hosts: command lines, messages, leases, the end.

Runs in: coordinator.
"""
