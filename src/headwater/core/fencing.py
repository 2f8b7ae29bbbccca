"""Write fencing: tokens with which the current claim of a subscription can write, and the state of a fenced stream.

An open proposal for the protocol (durable-streams #405 and #406), whose rules have the ids WF-01 to WF-28.
"""

from __future__ import annotations

import hmac
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final, NamedTuple

import msgspec

from headwater.core.producers import ProducerHeaders
from headwater.core.subscription_errors import Fenced, TokenInvalid

TOKEN_PREFIX: Final = "wt1."
TOKEN_TTL_MS: Final = 3_600_000
"""Heartbeats return a new token; the lease of the claim is what limits a token."""
BOUND_MAX: Final = 1_000
"""Producer ids that one stream binds."""
_WAKE_TOKEN: Final = re.compile(r"[0-9]{1,16}\.w_[0-9a-f]{24}\.\S+", re.ASCII)


class WriteCredentials(NamedTuple):
    """The token of an append, and whether it is from `Authorization`, where it may be a token for something else."""

    text: str
    is_bearer: bool = False


class WriteClaim(msgspec.Struct, frozen=True, array_like=True):
    """The claim that a write token is for. `authority` is the nonce of one incarnation of the subscription."""

    subscription: str
    authority: str
    generation: int
    wake_id: str
    holder: str
    expires_ms: int


_claims: Final = msgspec.json.Decoder(WriteClaim)


class FenceState(msgspec.Struct, omit_defaults=True):
    """The state of a fenced stream, deleted with it."""

    bound: list[str] = []
    """Producer ids that only fenced writes may use."""
    seals: dict[str, int] = {}
    """The last generation of each authority whose writes are refused."""
    written: tuple[int, int] | None = None
    """The offset after the last fenced write."""
    sealed_generation: int | None = None
    sealed_at: tuple[int, int] | None = None


encode_fence: Final = msgspec.json.Encoder().encode
decode_fence: Final = msgspec.json.Decoder(FenceState).decode


def make_write_token(secret: bytes, claim: WriteClaim) -> str:
    body = urlsafe_b64encode(msgspec.json.encode(claim)).decode()
    return f"{TOKEN_PREFIX}{body}.{_mac(secret, body)}"


def read_write_token(secret: bytes, text: str, now_ms: int) -> WriteClaim:
    """Verify a token and return its claim; an expired or foreign token is refused without a hint about the stream."""
    body, _, mac = text.removeprefix(TOKEN_PREFIX).partition(".")
    is_ours = text.startswith(TOKEN_PREFIX) and text.isascii()
    if not is_ours or not hmac.compare_digest(_mac(secret, body), mac):
        raise TokenInvalid("The write token is not valid; send the write_token of a claim.")
    claim = _claims.decode(urlsafe_b64decode(body))
    if claim.expires_ms <= now_ms:
        raise TokenInvalid("The write token has expired; acknowledge to get a new one.")
    return claim


def is_wake_token(text: str) -> bool:
    """Whether a bearer token has the form of a wake token, which does not authorise writes."""
    return _WAKE_TOKEN.fullmatch(text) is not None


def fenced(
    reason: str, detail: str, producer: ProducerHeaders | None, generation: int | None = None, holder: str = ""
) -> Fenced:
    """The refusal after which a writer stops: 409 with the reason, and a gap that no retry can close (WF-25)."""
    members: dict[str, str | int] = {"reason": reason}
    headers: list[tuple[str, str]] = []
    if generation is not None:
        members["generation"] = generation
    if holder:
        members["current_holder"] = holder
    if producer is not None:
        if generation is not None:
            headers.append(("Producer-Epoch", str(generation)))
        seq = str(producer.seq)
        headers += [("Producer-Expected-Seq", seq), ("Producer-Received-Seq", seq)]
    refusal = Fenced(detail, **members)
    refusal.headers = tuple(headers)
    return refusal


def _mac(secret: bytes, body: str) -> str:
    return urlsafe_b64encode(hmac.digest(secret, b"write\n" + body.encode(), "sha256")).decode().rstrip("=")
