"""Another server, as the stream commands see it: its address, the token, and what its refusals mean to a shell.

Invariant: whatever goes wrong between here and there ends as one sentence and one of the exit codes below.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import quote, urlsplit

import typer

from headwater.cli.errors import RUNTIME, USAGE, CommandError
from headwater.cli.interrupts import prompt_interrupts

if TYPE_CHECKING:
    import ssl

    import httpx

MISSING: Final = 3
CONFLICT: Final = 4
DENIED: Final = 5

DEFAULT_URL: Final = "http://localhost:4437"
STREAM_ROOT: Final = "/v1/stream/"
_NAME_SAFE: Final = "/-._~!$&'()*+,;=:@"
_READ_TIMEOUT_S: Final = 90.0
"""Longer than servers leave a live read open: a connection that is silent for so long is dead."""

Url = Annotated[
    str,
    typer.Option("--url", envvar="DS_URL", metavar="URL", help="The server; a stream given as a URL needs none."),
]
Token = Annotated[
    str,
    typer.Option("--token", envvar="DS_TOKEN", metavar="TOKEN", help="Bearer token.", show_default=False),
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        envvar="DS_CA_FILE",
        metavar="FILE",
        help="PEM certificates to trust an https server by, instead of the system's.",
        show_default=False,
    ),
]
Name = Annotated[
    str,
    typer.Argument(metavar="STREAM", help="A name, a path such as /ds/bucket/stream, or a URL.", show_default=False),
]


@dataclass(frozen=True, slots=True)
class Remote:
    """One server. Use `http` for requests; its errors are told by `told_plainly`."""

    url: str
    http: httpx.Client

    def address(self, name: str) -> str:
        """The URL of what was named on the command line."""
        if name.startswith(("http://", "https://")):
            return name.rstrip("/")
        if name.startswith("/"):
            return self.url + quote(name, safe=_NAME_SAFE)
        if not name:
            raise CommandError("the stream's name is empty", USAGE)
        return self.url + STREAM_ROOT + quote(name, safe=_NAME_SAFE)

    def path(self, name: str) -> str:
        """The path by which a header names a stream."""
        return urlsplit(self.address(name)).path


@contextmanager
def remote(url: str, token: str, ca_file: Path | None = None) -> Iterator[Remote]:
    """A server to talk to, for as long as the block lasts."""
    import httpx

    if not url.startswith(("http://", "https://")):
        raise CommandError(f"--url: {url!r} does not begin with http:// or https://", USAGE)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = httpx.Timeout(30.0, read=_READ_TIMEOUT_S)
    trust = trusting(ca_file) if ca_file is not None else True
    with (
        prompt_interrupts(),
        told_plainly(url),
        httpx.Client(headers=headers, timeout=timeout, follow_redirects=True, verify=trust) as http,
    ):
        yield Remote(url.rstrip("/"), http)


def trusting(ca_file: Path) -> ssl.SSLContext:
    """A client that trusts these certificates and no others."""
    import ssl

    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise CommandError(f"--ca-file: {ca_file} cannot be read as PEM certificates: {error}", USAGE) from None


@contextmanager
def told_plainly(url: str) -> Iterator[None]:
    """Turn what a server or the network says into a sentence and an exit code."""
    import httpx

    from headwater.client.errors import ClientError, Refused

    try:
        yield
    except httpx.ConnectError as error:
        raise CommandError(
            f"cannot reach {url}: {error}; is a server running there? `headwater serve` starts one"
        ) from None
    except httpx.TimeoutException:
        raise CommandError(f"{url} did not answer in time") from None
    except httpx.InvalidURL as error:
        raise CommandError(f"{error}", USAGE) from None
    except httpx.HTTPError as error:
        raise CommandError(f"{url}: {str(error) or type(error).__name__}") from None
    except Refused as refused:
        raise CommandError(_advised(refused), exit_code(refused.status)) from None
    except ClientError as error:
        raise CommandError(f"{url}: {error}") from None


def exit_code(status: int) -> int:
    """What a refusal is to a shell script."""
    if status in {404, 410}:
        return MISSING
    if status in {401, 403}:
        return DENIED
    if status in {409, 412}:
        return CONFLICT
    return USAGE if status in {400, 405, 413, 414, 415, 431} else RUNTIME


def _advised(refused: Exception) -> str:
    status = getattr(refused, "status", 0)
    if status in {401, 403}:
        return f"{refused} (give a token with --token or DS_TOKEN)"
    if getattr(refused, "code", "") == "stream_recreated":
        return f"{refused} (a file of --resume from the old stream must be deleted first)"
    if status == 410:
        return f"{refused} (what lies before the earliest retained offset is gone; see `headwater head`)"
    return str(refused)


def look_at(server: Remote, address: str) -> httpx.Headers:
    """What HEAD says of a stream. It has no body to say what is wrong, so that is said here."""
    from headwater.client.errors import check

    answer = server.http.head(address)
    if answer.status_code == 404:
        raise CommandError(f"404: there is no stream {address}", MISSING)
    if answer.status_code == 410:
        raise CommandError(f"410: the stream {address} is gone", MISSING)
    if answer.status_code in {401, 403}:
        raise CommandError(f"{answer.status_code}: {address} wants a token (--token or DS_TOKEN)", DENIED)
    check(answer, 200)
    next_offset(answer)
    return answer.headers


def is_json_type(headers: httpx.Headers) -> bool:
    kind: str = headers.get("content-type", "")
    return kind.partition(";")[0].strip().lower() == "application/json"


def next_offset(response: httpx.Response) -> str:
    """The offset that every answer about a stream carries."""
    offset = response.headers.get("stream-next-offset")
    if not isinstance(offset, str):
        raise CommandError(f"{response.url} answers without Stream-Next-Offset: it is no Durable Streams server")
    return offset
