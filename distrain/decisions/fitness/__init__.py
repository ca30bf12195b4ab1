"""What measurements of hosts say: which host is slow, or which connection between two. Pure. Runs in: coordinator."""
