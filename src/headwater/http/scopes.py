"""The streams that a request may name in its body or its query, as the proxy says.

A proxy that checks tokens decides by the path of a request. Requests about many streams name them elsewhere; for these
it passes on what the token allows, in headers that it never accepts from clients, and the server applies it.
Without these headers everything is allowed: they can only narrow.
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
    """Only streams below this path, and those of the bucket with this id; empty: all. Percent-encoded in its header."""
    denies_reserved: bool = False
    """No streams whose names begin with two underscores, and no search for names outside a namespace."""
    subject: str = ""
    """The subject of the token; only for comparing two requests."""

    @staticmethod
    def of(request: Request) -> Scope:
        namespace = unquote(request.header(NAMESPACE_HEADER) or "")
        denies_reserved = request.headers.get(RESERVED_HEADER) == b"deny"
        return Scope(namespace, denies_reserved, request.header(SUBJECT_HEADER) or "")

    def allows(self, name: str) -> bool:
        """Whether a stream may be seen, by its canonical name."""
        root = "/ds/" if is_bucketed(name) else ""
        below = name.removeprefix(root)
        if self.denies_reserved and any(part.startswith("__") for part in below.split("/")[: 2 if root else 1]):
            return False
        return not self.namespace or below.startswith(f"{self.namespace}/")

    def check_name(self, name: str) -> str:
        if not self.allows(name):
            raise OutsideNamespace(f"The token does not allow access to {name!r}.")
        return name

    def check_prefix(self, prefix: str) -> str:
        """A prefix of names, which must be entirely inside the namespace."""
        if self.namespace and not prefix.startswith(f"{self.namespace}/"):
            raise OutsideNamespace(f"The prefix must begin with {self.namespace + '/'!r}, the token's namespace.")
        if self.denies_reserved and not self.namespace:
            raise OutsideNamespace("A prefix requires the scope streams:admin, or a token with a namespace.")
        return prefix
