"""The work: the pickled train_func or script, as the coordinator makes it and a worker opens it.

Agents carry it as bytes and never open it. Runs in: coordinator, worker.
"""
