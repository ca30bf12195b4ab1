"""Tasks and actors of Ray, which run in place; and the facts of its cluster, which is this machine. Runs in: anywhere."""
