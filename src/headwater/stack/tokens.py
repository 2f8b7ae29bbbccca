"""Tokens for tests and development: valid ones, and one of each kind that must be rejected.

Invariant: a flawed token differs from a valid one only in the requested flaws, so that a rejection proves the check
under test.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
import warnings
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from headwater.stack.keys import Algorithm, KeyRing, new_key

if TYPE_CHECKING:
    from headwater.stack.keys import PrivateKey

LONG_AGO_S: Final = 24 * 3600
"""How long ago an expired token expired: much longer than any clock skew that a proxy tolerates."""


class TokenFlaw(StrEnum):
    """A defect that a test token can have."""

    EXPIRED = "expired"
    NO_EXPIRY = "no-expiry"
    NOT_YET = "not-yet"
    WRONG_ISSUER = "wrong-issuer"
    WRONG_AUDIENCE = "wrong-audience"
    NO_AUDIENCE = "no-audience"
    NO_SUBJECT = "no-subject"
    FOREIGN_KEY = "foreign-key"
    UNKNOWN_KEY = "unknown-key"
    ALG_NONE = "alg-none"
    PUBLIC_KEY_AS_SECRET = "public-key-as-secret"
    TAMPERED = "tampered"


ADMIN_SCOPE: Final = "streams:admin"
"""Allows everything, including reserved names: the list of streams, subscriptions, the pipeline's state."""


@dataclass(frozen=True, slots=True)
class TokenClaims:
    """The claims of a valid token."""

    issuer: str
    audience: str
    subject: str = "test-user"
    scope: str = ""
    namespace: str = ""
    namespace_claim: str = "ns"
    ttl_s: int = 3600


def mint(
    ring: KeyRing,
    claims: TokenClaims,
    algorithm: Algorithm = Algorithm.RS256,
    flaws: frozenset[TokenFlaw] = frozenset(),
) -> str:
    """Create a token (a compact JWS, RFC 7515), signed with the ring's current key unless a flaw changes that."""
    kid, key = ring.signing_key(algorithm)
    header = {"alg": algorithm.value, "typ": "JWT", "kid": kid}
    payload = _payload(claims, flaws)
    if TokenFlaw.UNKNOWN_KEY in flaws:
        header["kid"] = secrets.token_urlsafe(16)
    if TokenFlaw.ALG_NONE in flaws:
        return f"{_segment({'alg': 'none', 'typ': 'JWT'})}.{_segment(payload)}."
    if TokenFlaw.PUBLIC_KEY_AS_SECRET in flaws:
        # A verifier that lets the token choose the algorithm would use the published key as the shared secret.
        # The JOSE library refuses to create such a token, so it is assembled here.
        signed = f"{_segment({**header, 'alg': 'HS256'})}.{_segment(payload)}"
        signature = hmac.digest(key.as_pem(private=False), signed.encode(), hashlib.sha256)
        return f"{signed}.{_base64url(signature)}"
    if TokenFlaw.FOREIGN_KEY in flaws:
        key = new_key(algorithm)
    token = sign(header, payload, key)
    if TokenFlaw.TAMPERED in flaws:
        signature_text = token.rpartition(".")[2]
        return f"{_segment(header)}.{_segment({**payload, 'sub': 'another-user'})}.{signature_text}"
    return token


def sign(header: dict[str, str], payload: dict[str, object], key: PrivateKey) -> str:
    """Sign a header and a payload and return the compact form."""
    from joserfc import jws  # noqa: PLC0415  (takes 0.1 s, and most commands need no tokens)

    with warnings.catch_warnings():
        # RFC 9864 renames EdDSA to Ed25519; Envoy knows only the old name.
        warnings.simplefilter("ignore")
        return jws.serialize_compact(dict(header), msgspec.json.encode(payload), key, algorithms=[header["alg"]])


def _payload(claims: TokenClaims, flaws: frozenset[TokenFlaw]) -> dict[str, object]:
    now = int(time.time())
    issued = now - LONG_AGO_S if TokenFlaw.EXPIRED in flaws else now
    payload: dict[str, object] = {
        "iss": "another-issuer" if TokenFlaw.WRONG_ISSUER in flaws else claims.issuer,
        "aud": "another-audience" if TokenFlaw.WRONG_AUDIENCE in flaws else claims.audience,
        "sub": claims.subject,
        "iat": issued,
        "exp": issued + (min(claims.ttl_s, LONG_AGO_S // 2) if TokenFlaw.EXPIRED in flaws else claims.ttl_s),
    }
    if claims.scope:
        payload["scope"] = claims.scope
    if claims.namespace:
        payload[claims.namespace_claim] = claims.namespace
    if TokenFlaw.NOT_YET in flaws:
        payload["nbf"] = now + LONG_AGO_S
        payload["exp"] = now + 2 * LONG_AGO_S
    missing = ((TokenFlaw.NO_EXPIRY, "exp"), (TokenFlaw.NO_AUDIENCE, "aud"), (TokenFlaw.NO_SUBJECT, "sub"))
    for flaw, name in missing:
        if flaw in flaws:
            del payload[name]
    return payload


def _segment(value: dict[str, str] | dict[str, object]) -> str:
    return _base64url(msgspec.json.encode(value))


def _base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")
