"""The version, in one place. Runs in: anywhere."""

__all__ = ["__version__"]

__version__ = "0.1.0"
