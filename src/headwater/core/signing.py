"""Signatures of webhooks, and tokens that prove which wake a worker belongs to.

Webhooks are signed with Ed25519 over `{time}.{body}`; receivers look the public key up by its `kid` in the key set. A
new key is published before it signs, and an old one stays published afterwards, so a receiver with a cached key set, or
one that checks a late delivery, can always verify a signature. Tokens are MACs over the wake they belong to: they are
not stored, and stay valid after a restart.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from headwater.core.subscription_errors import TokenInvalid

SEED_BYTES: Final = 32
JWKS_MAX_AGE_S: Final = 300
"""How long receivers may cache the key set; a new key waits as long before it signs."""
PUBLISHED_AFTER_MS: Final = 3_600_000
"""An old key stays published this long: well over the replay window of five minutes that receivers allow."""


class SavedKey(msgspec.Struct, frozen=True, array_like=True):
    """A signing key: its private seed, and the time from which it signs."""

    seed: bytes
    created_ms: int
    active_from_ms: int


encode_key = msgspec.msgpack.Encoder().encode
decode_key = msgspec.msgpack.Decoder(SavedKey).decode


class PublicKey(NamedTuple):
    kid: str
    x: str


class SigningKey:
    """A key in use. Neither its repr nor anything else that is logged shows the private part."""

    __slots__ = ("_private", "active_from_ms", "created_ms", "public")

    def __init__(self, saved: SavedKey) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(saved.seed)
        self.created_ms: Final = saved.created_ms
        self.active_from_ms: Final = saved.active_from_ms
        x = _base64url(self._private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))
        # The key's thumbprint (RFC 7638, RFC 8037): the same key always has the same id.
        thumbprint = sha256(f'{{"crv":"Ed25519","kty":"OKP","x":"{x}"}}'.encode()).digest()
        self.public: Final = PublicKey(f"ds_{_base64url(thumbprint)}", x)

    def sign(self, body: bytes, now_s: int) -> str:
        """The Webhook-Signature header of a body."""
        signature = self._private.sign(b"%d.%b" % (now_s, body))
        return f"t={now_s},kid={self.public.kid},ed25519={_base64url(signature)}"


def jwk(key: PublicKey) -> dict[str, str]:
    return {"kty": "OKP", "crv": "Ed25519", "x": key.x, "kid": key.kid, "use": "sig", "alg": "EdDSA"}


def current_key(keys: Sequence[SigningKey], now_ms: int) -> SigningKey:
    """The key that signs now: the newest active one, or the first one if none is active yet."""
    active = [key for key in keys if key.active_from_ms <= now_ms]
    return max(active or keys[:1], key=lambda key: key.active_from_ms)


def outlived(keys: Sequence[SigningKey], now_ms: int) -> list[SigningKey]:
    """The keys whose signatures are all too old for a receiver to verify."""
    ordered = sorted(keys, key=lambda key: key.active_from_ms)
    return [key for key, successor in pairwise(ordered) if successor.active_from_ms + PUBLISHED_AFTER_MS <= now_ms]


class WakeToken(NamedTuple):
    """The wake that a token belongs to."""

    generation: int
    wake_id: str


def make_token(secret: bytes, subscription: str, token: WakeToken) -> str:
    return f"{token.generation}.{token.wake_id}.{_mac(secret, subscription, token)}"


def read_token(secret: bytes, subscription: str, text: str) -> WakeToken:
    """Verify a token of this subscription and return the wake that it belongs to."""
    generation, _, rest = text.partition(".")
    wake_id, _, mac = rest.partition(".")
    if not (generation.isascii() and generation.isdecimal() and len(generation) <= 16 and mac.isascii()):
        raise TokenInvalid("The bearer token is not valid; send the token of the wake.")
    token = WakeToken(int(generation), wake_id)
    if not hmac.compare_digest(_mac(secret, subscription, token).encode(), mac.encode()):
        raise TokenInvalid("The bearer token is not valid for this subscription; send the token of its wake.")
    return token


def _mac(secret: bytes, subscription: str, token: WakeToken) -> str:
    # A subscription's id has no control characters and a wake id has no newline, so the parts cannot be confused.
    message = f"{subscription}\n{token.generation}\n{token.wake_id}".encode("utf-8", "surrogatepass")
    return _base64url(hmac.digest(secret, message, "sha256"))


def _base64url(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode("ascii")
