"""The places where ranks live: on hosts with agents, in processes of another launcher, or in this process.

:mod:`distrain.coordinator.ranks.port` is what the coordinator needs of them. Runs in: the user's process.
"""
