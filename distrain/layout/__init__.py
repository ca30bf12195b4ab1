"""The parts of a run directory that a quick reader needs: names, lines, the lock. Little is imported here.

Runs in: anywhere.
"""
