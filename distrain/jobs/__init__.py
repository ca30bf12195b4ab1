"""Jobs: runs that wait in a queue until GPUs are free, and that outlive the terminal that started them.

There is no daemon. Each job is one process, the waiter, which becomes the coordinator of its run. All waiters see the
tickets in one directory (:mod:`~distrain.jobs.desk`), and each works out by itself whose turn it is
(:mod:`~distrain.jobs.turn`). What is granted is claimed on the hosts (:mod:`distrain.hosts.claims`), where the kernel
sees to it that nobody else gets it.

Runs in: the user's process; :mod:`~distrain.jobs.side` on the hosts.
"""
