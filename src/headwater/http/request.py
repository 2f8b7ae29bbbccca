"""A parsed request: method, target, headers and the complete body."""

from __future__ import annotations

import msgspec

from headwater.core.rules import CLOSED_HEADER
from headwater.engine.uploads import BlobUpload


class Request(msgspec.Struct, gc=False):
    """A request. Header names are lower case; values are bytes, decoded as Latin-1 when needed."""

    method: bytes
    target: bytes
    headers: dict[bytes, bytes]
    body: bytes
    http_1_0: bool
    keep_alive: bool
    reserved_bytes: int = 0
    """Bytes reserved for the body in the budget of all connections; released when the request is complete."""
    waiting_bytes: int = 0
    """Memory of the request that is not reserved, as it counts while the request is queued."""
    is_proxied: bool = False
    """Whether a trusted proxy sent it, so that its forwarding headers are used."""

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return value.decode("latin-1") if value is not None else None

    def asks_to_close_stream(self) -> bool:
        """Whether `Stream-Closed` is `true`, in any case; other values are ignored (protocol §4.1)."""
        value = self.headers.get(b"stream-closed")
        return value is not None and value.lower() == _TRUE

    def asks_to_fence_writes(self) -> bool:
        """Whether `Write-Fence` is `true`, in any case; other values are ignored."""
        return self.headers.get(b"write-fence", b"").lower() == _TRUE


class UploadRequest(Request, gc=True):
    """A request whose body was written to storage while it arrived; `body` is empty."""

    upload: BlobUpload | None = None


_TRUE = CLOSED_HEADER[1].encode()
