"""Refusals that several operations on streams share."""

from __future__ import annotations

from headwater.core.errors import MethodNotAllowed, StreamDeleted, StreamNotFound


def not_found(name: str) -> StreamNotFound:
    return StreamNotFound(f"There is no stream {name!r}; create it with PUT, or check the name.")


def soft_deleted(name: str) -> StreamDeleted:
    return StreamDeleted(f"Stream {name!r} was deleted, and forks still use its data; use another name.")


def read_only(name: str) -> MethodNotAllowed:
    return MethodNotAllowed(
        f"Stream {name!r} is written by the server; clients can only read it.", (("Allow", "GET, HEAD, OPTIONS"),)
    )
