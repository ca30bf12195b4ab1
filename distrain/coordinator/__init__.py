"""The user's process while workers train: it connects to the hosts, carries out decisions, keeps what ranks report.

Nothing here may wait for a disk, a console or user code in the loop. Runs in: coordinator.
"""
