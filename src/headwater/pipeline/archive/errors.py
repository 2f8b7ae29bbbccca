"""The exception raised by archives."""

from __future__ import annotations


class ArchiveError(Exception):
    """The archive is damaged or cannot be used in this way; the message says what to do."""
