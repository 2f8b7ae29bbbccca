"""A request as the connection read it: method, target, headers and the whole body."""

from __future__ import annotations

import msgspec

from headwater.core.rules import CLOSED_HEADER
from headwater.engine.uploads import BlobUpload


class Request(msgspec.Struct, gc=False):
    """Header names are lower case; values are kept as bytes and decoded as Latin-1 when asked for."""

    method: bytes
    target: bytes
    headers: dict[bytes, bytes]
    body: bytes
    http_1_0: bool
    keep_alive: bool

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return value.decode("latin-1") if value is not None else None

    def origin(self, own_scheme: str) -> str:
        """Scheme and host as the client reached the server, through a proxy or not; empty when it did not say."""
        host = self.header(b"host")
        if not host:
            return ""
        scheme = self.header(b"x-forwarded-proto")
        return f"{scheme if scheme in ('http', 'https') else own_scheme}://{host}"

    def asks_to_close_stream(self) -> bool:
        """`Stream-Closed` counts only when it says true, in any case (protocol §4.1)."""
        value = self.headers.get(b"stream-closed")
        return value is not None and value.lower() == _TRUE


class UploadRequest(Request, gc=True):
    """A request whose body went to its place while it arrived; `body` is empty."""

    upload: BlobUpload


_TRUE = CLOSED_HEADER[1].encode()
