"""The classes that users write and get: configs, contexts, results, observers. Runs in: anywhere."""
