"""The run directory, local or remote: paths, records, locks and the checkpoints in it, as every process reads them.

Only the coordinator commits and deletes checkpoints (:mod:`distrain.coordinator.store`). Runs in: anywhere.
"""
