"""Headwater: a Durable Streams server. This module holds the version and nothing else, so importing it is free."""

__version__ = "0.1.0"
