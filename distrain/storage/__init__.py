"""The run directory, local or on fsspec: its paths, its records, its lock, and how files get into it.

Only the coordinator commits and deletes checkpoints; workers and uploaders bring files.
Runs in: coordinator, worker, uploader.
"""
