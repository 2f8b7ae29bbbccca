"""`headwater subscription …`: create, list, describe, link and delete subscriptions."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.listing import AsJson
from headwater.cli.output import quiet_broken_pipe
from headwater.cli.remote import DEFAULT_URL, CaFile, Token, Url, connected
from headwater.printable import printable, printable_json

app = typer.Typer(help="Create, list and describe subscriptions, which wake workers when streams get messages.")

Id = Annotated[str, typer.Argument(metavar="ID", help="The id of the subscription.", show_default=False)]
Streams = Annotated[list[str] | None, typer.Option("--stream", metavar="NAME", help="A stream; may be repeated.")]


@app.command()
def create(
    id_: Id,
    pattern: Annotated[
        str | None, typer.Option("--pattern", metavar="GLOB", help="orders/**; * matches one segment, ** any number.")
    ] = None,
    streams: Streams = None,
    webhook: Annotated[str | None, typer.Option("--webhook", metavar="URL", help="The server calls this URL.")] = None,
    wake_stream: Annotated[
        str | None, typer.Option("--wake-stream", metavar="NAME", help="Workers follow this stream and claim work.")
    ] = None,
    lease_ms: Annotated[int | None, typer.Option("--lease-ms", metavar="MS", help="Lifetime of a lease.")] = None,
    description: Annotated[str | None, typer.Option("--description", metavar="TEXT")] = None,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Create a subscription: webhook with --webhook, pull-wake with --wake-stream."""
    from headwater.client import subscriptions

    if (webhook is None) == (wake_stream is None):
        raise CommandError("give either --webhook URL or --wake-stream NAME", USAGE)
    if pattern is None and not streams:
        raise CommandError("give --pattern GLOB, or --stream NAME, or both", USAGE)
    given: dict[str, Any] = {
        "type": "webhook" if webhook is not None else "pull-wake",
        "pattern": pattern,
        "streams": streams,
        "webhook": {"url": webhook} if webhook is not None else None,
        "wake_stream": wake_stream,
        "lease_ttl_ms": lease_ms,
        "description": description,
    }
    configuration = {name: value for name, value in given.items() if value is not None}
    with connected(url, token, ca_file) as client:
        is_new = client.run(subscriptions.put(client.policy, client.base_url, id_, configuration))
        typer.echo(f"{'created' if is_new else 'exists'} {printable(id_)}")


@app.command()
def ls(as_json: AsJson = False, url: Url = DEFAULT_URL, token: Token = "", ca_file: CaFile = None) -> None:
    """List the subscriptions: id, type, status and number of streams."""
    from headwater.client import subscriptions

    with quiet_broken_pipe(), connected(url, token, ca_file) as client:
        for found in client.iterate(subscriptions.every(client.policy, client.base_url)):
            if as_json:
                typer.echo(printable_json(json.dumps(found, ensure_ascii=False)))
            else:
                count = found.get("stream_count", 0)
                words = [found["id"], found.get("type", ""), found.get("status", "")]
                words.append(f"{count} stream{'' if count == 1 else 's'}")
                typer.echo(printable("  ".join([*words, *_failure(found)])))


@app.command()
def show(id_: Id, as_json: AsJson = False, url: Url = DEFAULT_URL, token: Token = "", ca_file: CaFile = None) -> None:
    """Describe a subscription: its configuration, and the acknowledged offset of each stream."""
    from headwater.client import subscriptions

    with quiet_broken_pipe(), connected(url, token, ca_file) as client:
        found = client.run(subscriptions.describe(client.policy, client.base_url, id_))
        if as_json:
            typer.echo(printable_json(json.dumps(found, ensure_ascii=False)))
            return
        facts = {
            "type": found.get("type"),
            "status": found.get("status"),
            "pattern": found.get("pattern"),
            "webhook": (found.get("webhook") or {}).get("url"),
            "wake stream": found.get("wake_stream"),
            "lease": f"{found['lease_ttl_ms']} ms" if "lease_ttl_ms" in found else None,
            "description": found.get("description"),
            "failure": " ".join(_failure(found)) or None,
        }
        for name, value in facts.items():
            if value is not None:
                typer.echo(f"{name:<12} {printable(str(value))}")
        for linked in found.get("streams", ()):
            typer.echo(printable(f"{linked['acked_offset']}  {linked['link_type']:<8}  {linked['path']}"))


@app.command()
def link(
    id_: Id,
    streams: Annotated[list[str], typer.Argument(metavar="STREAM...", help="Names of streams.", show_default=False)],
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Link streams to a subscription, in addition to its pattern."""
    from headwater.client import subscriptions

    with connected(url, token, ca_file) as client:
        client.run(subscriptions.link(client.policy, client.base_url, id_, streams))
        typer.echo(f"linked {printable(' '.join(streams))}")


@app.command()
def unlink(
    id_: Id,
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The name of a stream.", show_default=False)],
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Remove an explicit link."""
    from headwater.client import subscriptions

    with connected(url, token, ca_file) as client:
        client.run(subscriptions.unlink(client.policy, client.base_url, id_, stream))
        typer.echo(f"unlinked {printable(stream)}")


@app.command()
def delete(id_: Id, url: Url = DEFAULT_URL, token: Token = "", ca_file: CaFile = None) -> None:
    """Delete a subscription and its acknowledged offsets, but not its streams."""
    from headwater.client import subscriptions

    with connected(url, token, ca_file) as client:
        client.run(subscriptions.delete(client.policy, client.base_url, id_))
        typer.echo(f"deleted {printable(id_)}")


def _failure(found: dict[str, Any]) -> list[str]:
    """Why its worker is not woken, if the server reports it."""
    failure = found.get("failure")
    if not isinstance(failure, dict):
        return []
    reason = failure.get("reason") or "the last delivery failed"
    retry = f"; next attempt at {failure['retry_at']}" if "retry_at" in failure else ""
    return [f"{reason}{retry}"]
