"""The parts of ``scripts/benchmark``: what is launched, how it is contained, what is measured, how it is shown."""
