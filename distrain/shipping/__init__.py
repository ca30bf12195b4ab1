"""Hosts that share no files with the user's machine: what they need, and where they keep it.

Runs in: coordinator (the user's code, requirements, distrain itself), agent (the cache of a host, environments).
"""
