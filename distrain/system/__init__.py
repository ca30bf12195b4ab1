"""The ground that every process stands on: processes and signals, the event loop, threads for slow work, consoles.

It knows nothing of runs, hosts or ranks. Runs in: every process.
"""

__version__ = "0.1.0"
