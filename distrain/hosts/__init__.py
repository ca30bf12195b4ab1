"""Hosts: how a user names them, what they have (CPUs, memory, GPUs, network), and which rank runs where.

Most of it is asked by the coordinator and answered by the agent. Runs in: coordinator, agent.
"""
