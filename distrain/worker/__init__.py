"""One rank: its entry point, the session behind report(), and the call of train_func.

Runs in: worker.
"""
