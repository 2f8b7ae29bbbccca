"""Scopes: the streams that a request may access through its body or its query, according to the proxy.

A proxy that checks tokens decides by the path of a request. Requests for many streams list them in the body or the
query; for these the proxy sends the permissions of the token, in headers that it never accepts from clients, and the
server applies them. Without these headers everything is allowed.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import unquote

from headwater.core.buckets import is_bucketed
from headwater.core.errors import OutsideNamespace
from headwater.http.request import Request

NAMESPACE_HEADER: Final = b"x-headwater-namespace"
RESERVED_HEADER: Final = b"x-headwater-reserved"
SUBJECT_HEADER: Final = b"x-jwt-sub"


class Scope(NamedTuple):
    """The permissions of a request's token."""

    namespace: str = ""
    """Only streams below this path, and those of the bucket with this id; empty means all. Percent-encoded in its
    header."""
    denies_reserved: bool = False
    """Whether streams whose names begin with two underscores are refused, and searches outside a namespace."""
    subject: str = ""
    """The subject of the token; only used to compare two requests."""

    @staticmethod
    def of(request: Request) -> Scope:
        namespace = unquote(request.header(NAMESPACE_HEADER) or "")
        denies_reserved = request.headers.get(RESERVED_HEADER) == b"deny"
        return Scope(namespace, denies_reserved, request.header(SUBJECT_HEADER) or "")

    def allows(self, name: str) -> bool:
        """Whether a stream may be accessed, by its canonical name."""
        root = "/ds/" if is_bucketed(name) else ""
        below = name.removeprefix(root)
        if self.denies_reserved and any(part.startswith("__") for part in below.split("/")[: 2 if root else 1]):
            return False
        return not self.namespace or below.startswith(f"{self.namespace}/")

    def check_name(self, name: str) -> str:
        if not self.allows(name):
            raise OutsideNamespace(f"The token does not allow access to {name!r}; use a token for this stream.")
        return name

    def check_prefix(self, prefix: str) -> str:
        """Check a prefix of names, which must be entirely inside the namespace, and return it."""
        if self.namespace and not prefix.startswith(f"{self.namespace}/"):
            raise OutsideNamespace(
                f"Prefix {prefix!r} must begin with {self.namespace + '/'!r}, the token's namespace."
            )
        if self.denies_reserved and not self.namespace:
            raise OutsideNamespace(
                f"The token does not allow access to all streams{f' under {prefix!r}' if prefix else ''}; use one with"
                " the scope streams:admin, or with a namespace."
            )
        return prefix
