"""The run directory, local or remote: its paths, records and locks, and how files get into it.

Only the coordinator, by a :class:`~distrain.storage.run_store.RunStore`, commits and deletes checkpoints. Workers and
uploaders bring files. Runs in: coordinator, worker, uploader.
"""
