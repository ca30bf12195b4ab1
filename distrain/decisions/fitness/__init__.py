"""Verdicts on measurements of hosts: the slow host, or the slow connection between two. Pure. Runs in: coordinator."""
