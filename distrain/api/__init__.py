"""What users write and call: configs, report() and its relatives, contexts, results. Runs in: anywhere."""
