"""The files of the stream browser below `/ui/`, served from memory.

Invariant: the page runs only its own scripts. Its policy allows no inline script or style, no frame, no
form target, and no conversion of a string to markup (Trusted Types), so that stream data is only shown as text.
`connect-src` allows all http and https addresses because the page can connect to any server by its base address; this
does not extend what the page may load and run.
"""

from __future__ import annotations

from hashlib import sha256
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final, NamedTuple

from headwater.core.errors import NotFound
from headwater.http.context import Context
from headwater.http.headers import NO_CACHE, NOT_MODIFIED, OK, TEMPORARY_REDIRECT, header
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Response

ROOT: Final = "/ui"

POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self' http: https:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PROTECTION: Final = b"".join(
    header(name, value)
    for name, value in (
        ("Content-Security-Policy", POLICY),
        ("X-Frame-Options", "DENY"),
        ("Referrer-Policy", "no-referrer"),
        ("Cross-Origin-Opener-Policy", "same-origin"),
    )
)


class UiFile(NamedTuple):
    headers: bytes
    etag: bytes
    body: bytes


def handle(context: Context, request: Request, address: Address) -> Response:
    if address.name in {"/", ROOT}:
        # Relative, so that it works below a proxy's prefix.
        return Response(TEMPORARY_REDIRECT, NO_CACHE + b"Location: ui/\r\n")
    page = _PAGES.get(address.name)
    if page is None:
        raise NotFound("The stream browser has no such file; it begins at /ui/.")
    if request.headers.get(b"if-none-match") == page.etag:
        return Response(NOT_MODIFIED, page.headers)
    return Response(OK, page.headers, page.body)


def _pages() -> dict[str, UiFile]:
    found: dict[str, UiFile] = {}
    _collect(resources.files("headwater") / "ui", f"{ROOT}/", found)
    found[f"{ROOT}/"] = found[f"{ROOT}/index.html"]
    return found


def _collect(directory: Traversable, at: str, found: dict[str, UiFile]) -> None:
    for entry in directory.iterdir():
        if entry.is_dir():
            _collect(entry, f"{at}{entry.name}/", found)
            continue
        kind = _TYPES.get(f".{entry.name.rpartition('.')[2]}")
        if kind is None:
            continue
        body = entry.read_bytes()
        etag = f'"{sha256(body).hexdigest()[:16]}"'.encode()
        headers = NO_CACHE + _PROTECTION + header("Content-Type", kind) + b"ETag: " + etag + b"\r\n"
        found[at + entry.name] = UiFile(headers, etag, body)


_PAGES: Final = _pages()
