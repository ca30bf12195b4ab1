"""Streams that carry files to and from a host, and their two ends. Runs in: mover, stream server."""
