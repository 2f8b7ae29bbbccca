"""Headwater: a Durable Streams server. Here is only the version, so importing it is free."""

__version__ = "0.1.0"
