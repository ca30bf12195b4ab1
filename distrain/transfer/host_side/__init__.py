"""The far end: what a host that shares no files keeps for later runs, and how files get into place. Runs in: agent."""
