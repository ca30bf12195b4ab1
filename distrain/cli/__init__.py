"""The command distrain: look at runs, and act on them. ``run`` starts them.

Runs in: the user's process.
"""
