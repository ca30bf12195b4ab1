"""Files on their way to and from hosts that do not share them, over connections of their own.

Runs in: mover, stream server.
"""
