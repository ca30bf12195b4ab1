"""The version, in one place. Runs in: anywhere."""

__version__ = "0.1.0"
