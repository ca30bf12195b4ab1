"""Obstacles to the progress of a run: slow ranks, hangs, and collectives that do not match. Runs in: coordinator.

Pure: no I/O, no clock.
"""
