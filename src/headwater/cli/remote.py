"""The server of a stream command: its options, the client, and exit codes for errors.

Invariant: every error of the client ends the command with one line and one of the exit codes below.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from headwater.cli.errors import RUNTIME, USAGE, CommandError
from headwater.cli.interrupts import prompt_interrupts

if TYPE_CHECKING:
    from headwater.client import Client, ResponseError, Stream

MISSING: Final = 3
CONFLICT: Final = 4
DENIED: Final = 5

DEFAULT_URL: Final = "http://localhost:4437"
STREAM_ROOT: Final = "/v1/stream/"

Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar=["DS_URL", "DS_SERVER_URL"],
        metavar="URL",
        help="The server; not needed if the stream is given as a URL.",
    ),
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
        help="PEM file of CA certificates to trust instead of the system's.",
        show_default=False,
    ),
]
ShowProgress = Annotated[
    bool | None, typer.Option("--progress/--no-progress", help="Show a progress bar.", show_default="on a terminal")
]
Name = Annotated[
    str,
    typer.Argument(metavar="STREAM", help="A name, a path such as /ds/bucket/stream, or a URL.", show_default=False),
]


def check_url(url: str) -> None:
    """Refuse a `--url` that is not the address of a server."""
    if not url.startswith(("http://", "https://")):
        raise CommandError(
            f"--url: {url!r} does not begin with http:// or https://, as in http://localhost:4437", USAGE
        )


@contextmanager
def connected(url: str, token: str, ca_file: Path | None = None) -> Iterator[Client]:
    """A client for the duration of the block. It does not retry; errors end the command."""
    from headwater.client import NO_RETRY, Client, InvalidRequestError, Policy

    check_url(url)
    with prompt_interrupts(), client_errors(url):
        try:
            client = Client(url, token=token, ca_file=ca_file, policy=Policy(retry=NO_RETRY))
        except InvalidRequestError as error:
            raise CommandError(f"--ca-file: {error}" if ca_file else str(error), USAGE) from None
        with client:
            yield client


def stream_named(client: Client, name: str) -> Stream:
    """The stream named on the command line."""
    if not name:
        raise CommandError("the stream's name is empty; name a stream", USAGE)
    return client.stream(name)


@contextmanager
def client_errors(url: str) -> Iterator[None]:
    """Report errors of the client as one line and an exit code."""
    from headwater.client import ClientError, ConnectError, InvalidRequestError, ResponseError

    try:
        yield
    except ConnectError as error:
        if "WRONG_VERSION_NUMBER" in str(error):
            raise CommandError(f"the server at {url} does not use TLS; begin its URL with http://") from None
        raise CommandError(f"{error}; check that a server is running there (`headwater serve` starts one)") from None
    except InvalidRequestError as error:
        raise CommandError(str(error), USAGE) from None
    except ResponseError as error:
        raise CommandError(_advised(error), exit_code(error.status)) from None
    except ClientError as error:
        raise CommandError(f"{url}: {error}") from None


def exit_code(status: int) -> int:
    """The exit code for a response status."""
    if status in {404, 410}:
        return MISSING
    if status in {401, 403}:
        return DENIED
    if status in {409, 412}:
        return CONFLICT
    return USAGE if status in {400, 405, 413, 414, 415, 431} else RUNTIME


def _advised(error: ResponseError) -> str:
    if error.status in {401, 403}:
        return f"{error} (set {'a' if error.status == 401 else 'another'} token with --token or DS_TOKEN)"
    if error.status == 404 and error.code in {"", "stream_not_found"}:
        return f"{error} (`headwater ls` lists the streams, `headwater create` creates one)"
    if error.code == "stream_recreated":
        return f"{error} (delete the --resume file of the old stream first)"
    if error.status == 410:
        return f"{error} (data before the earliest retained offset is deleted; see `headwater head`)"
    return str(error)
