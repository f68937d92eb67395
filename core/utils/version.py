"""The version of dipole."""

__version__ = "0.1.0"
