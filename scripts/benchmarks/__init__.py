"""The parts of ``scripts/benchmark``: launchers, containment of runs, measures, and the table."""
