"""The error of archives."""

from __future__ import annotations


class ArchiveError(Exception):
    """An archive that is damaged, or that cannot be used in this way; the message says what to do."""
