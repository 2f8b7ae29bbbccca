"""`headwater ls` and `headwater head`: which streams there are, and what one is."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from headwater.cli.errors import CommandError
from headwater.cli.output import messages_of, readers_may_leave
from headwater.cli.reading import catch_up
from headwater.cli.remote import DEFAULT_URL, MISSING, CaFile, Name, Remote, Token, Url, look_at, remote
from headwater.printable import printable, printable_json

if TYPE_CHECKING:
    from collections.abc import Iterator

REGISTRY: Final = "__registry__"

AsJson = Annotated[bool, typer.Option("--json", help="As JSON lines.")]


def ls(
    prefix: Annotated[
        str, typer.Argument(metavar="[PREFIX]", help="Only names that begin so; /ds lists buckets, /ds/ID one of them.")
    ] = "",
    long: Annotated[bool, typer.Option("--long", "-l", help="With type and time of creation.")] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """List streams: those the server's registry tells of, buckets, or the streams of a bucket."""
    with readers_may_leave(), remote(url, token, ca_file) as server:
        for entry in _entries(server, prefix):
            if as_json:
                typer.echo(printable_json(json.dumps(entry, ensure_ascii=False)))
            elif long:
                made = entry.get("created_at_ms")
                when = datetime.fromtimestamp(made / 1000, UTC).isoformat(timespec="seconds") if made else "-"
                kind = printable(entry.get("content_type", "-"))
                typer.echo(f"{when}  {kind:<24}  {printable(entry['name'])}")
            else:
                typer.echo(printable(entry["name"]))


def head(
    stream: Name, as_json: AsJson = False, url: Url = DEFAULT_URL, token: Token = "", ca_file: CaFile = None
) -> None:
    """Print what a stream is: its type, where it ends, whether it is closed, how long it lives."""
    with remote(url, token, ca_file) as server:
        told = {
            name.lower(): value
            for name, value in look_at(server, server.address(stream)).items()
            if name.lower() == "content-type" or name.lower().startswith("stream-")
        }
        if as_json:
            typer.echo(json.dumps(told))
            return
        width = max(len(name) for name in told)
        for name, value in sorted(told.items()):
            typer.echo(f"{name:<{width}}  {printable(value)}")


def _entries(server: Remote, prefix: str) -> Iterator[dict[str, Any]]:
    if prefix in {"/ds", "/ds/"}:
        for bucket in _listed(server, f"{server.url}/ds", "buckets", {}):
            yield {"name": f"/ds/{bucket['bucket_id']}", **bucket}
    elif prefix.startswith("/ds/"):
        bucket_id, _, begins = prefix.removeprefix("/ds/").partition("/")
        query = {"prefix": begins} if begins else {}
        for stream in _listed(server, server.address(f"/ds/{bucket_id}/streams"), "streams", query):
            yield {"name": f"/ds/{bucket_id}/{stream['stream_id']}", **stream}
    else:
        yield from _registered(server, prefix)


def _listed(server: Remote, address: str, key: str, query: dict[str, str]) -> Iterator[dict[str, Any]]:
    """A list page by page."""
    from headwater.client.errors import check

    while True:
        answer = server.http.get(address, params=query)
        check(answer, 200)
        page = answer.json()
        yield from page[key]
        if not page["has_more"]:
            return
        query = query | {"after": page["next_cursor"]}


def _registered(server: Remote, prefix: str) -> list[dict[str, Any]]:
    """The registry folded: what it tells of and has not told to be gone."""
    from headwater.client.errors import StreamMissing

    found: dict[str, dict[str, Any]] = {}
    try:
        for body in catch_up(server, server.address(REGISTRY)):
            for message in messages_of(body, is_json=True):
                _fold(found, json.loads(message))
    except StreamMissing:
        raise CommandError(
            f"{server.url} keeps no registry, so its streams cannot be listed"
            " (Headwater: DS_REGISTRY__ENABLED=true, or serve --profile dev)",
            MISSING,
        ) from None
    return [found[name] for name in sorted(found) if name.startswith(prefix)]


def _fold(found: dict[str, dict[str, Any]], event: Any) -> None:
    if not isinstance(event, dict) or event.get("type") != "stream" or not isinstance(event.get("key"), str):
        return
    headers, value = event.get("headers"), event.get("value")
    if isinstance(headers, dict) and headers.get("operation") == "delete":
        found.pop(event["key"], None)
    elif isinstance(headers, dict) and isinstance(value, dict):
        content_type, created_at_ms = value.get("contentType"), value.get("createdAt")
        found[event["key"]] = {
            "name": event["key"],
            "content_type": content_type if isinstance(content_type, str) else "",
            "created_at_ms": created_at_ms if isinstance(created_at_ms, int) else None,
        }
