"""The version, apart from the package so that every layer may import it."""

__version__ = "0.1.0"
