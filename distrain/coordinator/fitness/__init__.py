"""Hosts that are slow or have failed: deep checks, and the memory of them. Runs in: coordinator."""
