"""`headwater token`: create tokens for the stack's proxy (valid or flawed), and manage the signing keys.

Invariant: stdout contains only the token (or the JWKS), so that `TOKEN=$(headwater token)` works.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.options import ConfigFile, settings_from
from headwater.config import Settings
from headwater.stack.keys import Algorithm, KeyRing
from headwater.stack.tokens import TokenClaims, TokenFlaw, mint

StackDirectory = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="DIR", help="Data directory of the stack; overrides the setting."),
]
KEYS_DIRECTORY = "keys"
_DAY_S = 24 * 3600


def token(
    sub: Annotated[str, typer.Option("--sub", help="The subject (the user).")] = "test-user",
    scope: Annotated[
        list[str] | None, typer.Option("--scope", help="streams:read, streams:write or streams:admin; can be repeated.")
    ] = None,
    ns: Annotated[str, typer.Option("--ns", help="Limit the token to streams in this namespace.")] = "",
    aud: Annotated[str | None, typer.Option("--aud", help="The audience; overrides the setting.")] = None,
    ttl: Annotated[int, typer.Option("--ttl", metavar="SECONDS", min=1, help="How long the token is valid.")] = 3600,
    alg: Annotated[Algorithm, typer.Option("--alg", help="The signature algorithm.")] = Algorithm.RS256,
    flaw: Annotated[
        list[TokenFlaw] | None,
        typer.Option("--flaw", help="Give the token this defect, to test that it is rejected; can be repeated."),
    ] = None,
    expired: Annotated[bool, typer.Option("--expired", help="Short for --flaw expired.")] = False,
    wrong_issuer: Annotated[bool, typer.Option("--wrong-issuer", help="Short for --flaw wrong-issuer.")] = False,
    wrong_audience: Annotated[bool, typer.Option("--wrong-audience", help="Short for --flaw wrong-audience.")] = False,
    foreign_key: Annotated[bool, typer.Option("--foreign-key", help="Short for --flaw foreign-key.")] = False,
    alg_none: Annotated[bool, typer.Option("--alg-none", help="Short for --flaw alg-none.")] = False,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Create new keys; tokens of the old keys stay valid.")
    ] = False,
    retire: Annotated[bool, typer.Option("--retire", help="Delete all old keys; their tokens become invalid.")] = False,
    jwks: Annotated[bool, typer.Option("--jwks", help="Print the public keys instead of a token.")] = False,
    data_dir: StackDirectory = None,
    config_file: ConfigFile = None,
) -> None:
    """Create a token that the stack's proxy accepts (or, with --flaw, must reject), or manage the signing keys."""
    settings = settings_from(None, config_file).settings
    if not settings.auth.has_own_keys:
        source = settings.auth.jwks_url or settings.auth.jwks_file
        raise CommandError(
            f"tokens are issued by the owner of {source}, which is configured as the key set; get a token there", USAGE
        )
    if ttl > 365 * _DAY_S:
        raise CommandError("--ttl: a token can be valid for at most one year (31536000 seconds)", USAGE)
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
        typer.echo(_summary(ring), err=True)
        return
    shorthands = (
        (expired, TokenFlaw.EXPIRED),
        (wrong_issuer, TokenFlaw.WRONG_ISSUER),
        (wrong_audience, TokenFlaw.WRONG_AUDIENCE),
        (foreign_key, TokenFlaw.FOREIGN_KEY),
        (alg_none, TokenFlaw.ALG_NONE),
    )
    flaws = frozenset(flaw or ()) | {shorthand for is_set, shorthand in shorthands if is_set}
    claims = replace(default_claims(settings), subject=sub, scope=" ".join(scope or ()), namespace=ns, ttl_s=ttl)
    if aud:
        claims = replace(claims, audience=aud)
    has_keys = ring.jwks_file.exists()
    token = mint(ring, claims, alg, flaws)
    if not has_keys:
        place = ring.jwks_file.parent
        typer.echo(f"headwater: created keys in {place}; a stack with this directory accepts the token", err=True)
    typer.echo(token)


def default_claims(settings: Settings) -> TokenClaims:
    """Claims that the stack's proxy accepts, with its defaults."""
    auth = settings.auth
    return TokenClaims(auth.issuer, auth.audience_list[0], namespace_claim=auth.namespace_claim or "ns")


def key_ring(settings: Settings, data_dir: Path | None) -> KeyRing:
    """Return the key ring of a stack's directory."""
    return KeyRing((data_dir or settings.stack.data_dir) / KEYS_DIRECTORY)


def _summary(ring: KeyRing) -> str:
    old = sum(not entry.current for entry in ring.entries())
    kept = f"; {old} older keys stay valid until `headwater token --retire`" if old else "; all older keys are deleted"
    return f"new tokens are signed with {len(Algorithm)} current keys{kept}"
