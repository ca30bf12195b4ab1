"""``distrain drill``: proves that a training script resumes exactly, by disturbing it. Runs in: anywhere.

A drill runs the script in processes of their own: twice undisturbed, then once for each disturbance. A
:class:`~distrain.drilling.probe.Probe` in every rank writes what it sees into the log of the rank, and kills when it is
asked to. Afterwards the logs, metrics and checkpoints of all trials are compared. The engine knows nothing of it.
"""
