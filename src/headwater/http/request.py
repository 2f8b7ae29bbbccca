"""A parsed request: method, target, headers and the complete body."""

from __future__ import annotations

import msgspec

from headwater.core.rules import CLOSED_HEADER
from headwater.engine.uploads import BlobUpload


class Request(msgspec.Struct, gc=False):
    """Header names are lower case; values are bytes, decoded as Latin-1 when needed."""

    method: bytes
    target: bytes
    headers: dict[bytes, bytes]
    body: bytes
    http_1_0: bool
    keep_alive: bool
    reserved_bytes: int = 0
    """Bytes reserved for the body from the budget of all connections; released when the request is answered."""
    is_proxied: bool = False
    """A trusted proxy sent it: its forwarding headers are believed."""

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return value.decode("latin-1") if value is not None else None

    def asks_to_close_stream(self) -> bool:
        """`Stream-Closed` counts only when it says true, in any case (protocol §4.1)."""
        value = self.headers.get(b"stream-closed")
        return value is not None and value.lower() == _TRUE

    def asks_to_fence_writes(self) -> bool:
        """`Write-Fence` counts only when it says true, likewise."""
        return self.headers.get(b"write-fence", b"").lower() == _TRUE


class UploadRequest(Request, gc=True):
    """A request whose body was written to storage while it arrived; `body` is empty."""

    upload: BlobUpload | None = None


_TRUE = CLOSED_HEADER[1].encode()
