"""The command distrain: look at runs, and act on them. Starting them is in distrain.launching.

Runs in: the user's process.
"""
