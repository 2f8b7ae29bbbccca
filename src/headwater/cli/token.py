"""`headwater token`: tokens for the stack's proxy, good ones and each kind of bad one; and the keys behind them.

Invariant: stdout carries the token (or the JWKS) and nothing else, so that `TOKEN=$(headwater token)` works.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.options import ConfigFile, settings_from
from headwater.config import Settings
from headwater.stack.keys import Algorithm, KeyRing
from headwater.stack.tokens import Claims, Flaw, mint

StackDirectory = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="DIR", help="The stack's directory, instead of the settings'."),
]
KEYS_DIRECTORY = "keys"
_DAY_S = 24 * 3600


def token(
    sub: Annotated[str, typer.Option("--sub", help="The subject: who it is.")] = "test-user",
    scope: Annotated[
        list[str] | None, typer.Option("--scope", help="streams:read, streams:write, streams:admin; may be repeated.")
    ] = None,
    ns: Annotated[str, typer.Option("--ns", help="The namespace that its streams must lie in.")] = "",
    aud: Annotated[str | None, typer.Option("--aud", help="The audience, instead of the settings'.")] = None,
    ttl: Annotated[int, typer.Option("--ttl", metavar="SECONDS", min=1, help="How long it is good for.")] = 3600,
    alg: Annotated[Algorithm, typer.Option("--alg", help="The algorithm that signs it.")] = Algorithm.RS256,
    flaw: Annotated[
        list[Flaw] | None, typer.Option("--flaw", help="Make it wrong in this way, to see it refused; may be repeated.")
    ] = None,
    expired: Annotated[bool, typer.Option("--expired", help="Short for --flaw expired.")] = False,
    wrong_issuer: Annotated[bool, typer.Option("--wrong-issuer", help="Short for --flaw wrong-issuer.")] = False,
    wrong_audience: Annotated[bool, typer.Option("--wrong-audience", help="Short for --flaw wrong-audience.")] = False,
    foreign_key: Annotated[bool, typer.Option("--foreign-key", help="Short for --flaw foreign-key.")] = False,
    alg_none: Annotated[bool, typer.Option("--alg-none", help="Short for --flaw alg-none.")] = False,
    rotate: Annotated[bool, typer.Option("--rotate", help="Make new keys; the old ones stay good.")] = False,
    retire: Annotated[bool, typer.Option("--retire", help="Drop all old keys: their tokens end.")] = False,
    jwks: Annotated[bool, typer.Option("--jwks", help="Print the public keys instead of a token.")] = False,
    data_dir: StackDirectory = None,
    config_file: ConfigFile = None,
) -> None:
    """Mint a token that the stack's proxy takes (or one that it must refuse), or see to its keys."""
    settings = settings_from(None, config_file).settings
    if not settings.auth.has_own_keys:
        source = settings.auth.jwks_url or settings.auth.jwks_file
        raise CommandError(f"the keys are not ours but those of {source}: get tokens where it does", USAGE)
    if ttl > 365 * _DAY_S:
        raise CommandError("--ttl: a token for more than a year is a password", USAGE)
    ring = key_ring(settings, data_dir)
    if rotate:
        ring.rotate()
    if retire:
        ring.retire()
    if jwks:
        ring.ensure()
        typer.echo(ring.jwks_file.read_text(encoding="utf-8"))
        return
    if rotate or retire:
        typer.echo(_said(ring), err=True)
        return
    shorthands = (
        (expired, Flaw.EXPIRED),
        (wrong_issuer, Flaw.WRONG_ISSUER),
        (wrong_audience, Flaw.WRONG_AUDIENCE),
        (foreign_key, Flaw.FOREIGN_KEY),
        (alg_none, Flaw.ALG_NONE),
    )
    flaws = frozenset(flaw or ()) | {meant for asked, meant in shorthands if asked}
    auth = settings.auth
    claims = Claims(
        issuer=auth.issuer,
        audience=aud or auth.audience_list[0],
        subject=sub,
        scope=" ".join(scope or ()),
        namespace=ns,
        namespace_claim=auth.namespace_claim or "ns",
        ttl_s=ttl,
    )
    typer.echo(mint(ring, claims, alg, flaws))


def key_ring(settings: Settings, data_dir: Path | None) -> KeyRing:
    """The keys of a stack's directory."""
    return KeyRing((data_dir or settings.stack.data_dir) / KEYS_DIRECTORY)


def _said(ring: KeyRing) -> str:
    old = sum(not entry.current for entry in ring.entries())
    kept = f"; {old} older ones stay good until `headwater token --retire`" if old else "; older ones are gone"
    return f"new tokens are signed by {len(Algorithm)} current keys{kept}"
