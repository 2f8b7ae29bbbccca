"""Tokens for tests and development: good ones, and one of each kind that must be refused.

Invariant: a token differs from a good one in the flaws it was asked for and in nothing else, so that a refusal
proves the check it was made for.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from headwater.stack.keys import Algorithm, KeyRing, PrivateKey, encoded, new_key

_P256_BYTES: Final = 32
LONG_AGO_S: Final = 24 * 3600
"""How long an expired token has been so: well beyond any clock skew that a proxy forgives."""


class Flaw(StrEnum):
    """What can be wrong with a token."""

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


@dataclass(frozen=True, slots=True)
class Claims:
    """What a good token says."""

    issuer: str
    audience: str
    subject: str = "test-user"
    scope: str = ""
    namespace: str = ""
    namespace_claim: str = "ns"
    ttl_s: int = 3600


def mint(
    ring: KeyRing,
    claims: Claims,
    algorithm: Algorithm = Algorithm.RS256,
    flaws: frozenset[Flaw] = frozenset(),
) -> str:
    """A compact JWS (RFC 7515), signed by the ring's current key unless a flaw says otherwise."""
    kid, key = ring.signing_key(algorithm)
    header = {"alg": algorithm.value, "typ": "JWT", "kid": kid}
    payload = _payload(claims, flaws)
    if Flaw.UNKNOWN_KEY in flaws:
        header["kid"] = secrets.token_urlsafe(16)
    if Flaw.ALG_NONE in flaws:
        header = {"alg": "none", "typ": "JWT"}
        return f"{_json(header)}.{_json(payload)}."
    if Flaw.PUBLIC_KEY_AS_SECRET in flaws:
        # A verifier that lets the token choose the algorithm would take the published key for the shared secret.
        header["alg"] = "HS256"
        signed = f"{_json(header)}.{_json(payload)}"
        return f"{signed}.{encoded(hmac.digest(_public_pem(key), signed.encode(), hashlib.sha256))}"
    if Flaw.FOREIGN_KEY in flaws:
        key = new_key(algorithm)
    token = sign(header, payload, key)
    if Flaw.TAMPERED in flaws:
        signature = token.rpartition(".")[2]
        return f"{_json(header)}.{_json({**payload, 'sub': 'somebody-else'})}.{signature}"
    return token


def sign(header: dict[str, str], payload: dict[str, object], key: PrivateKey) -> str:
    """The compact form of these two, signed."""
    signed = f"{_json(header)}.{_json(payload)}"
    return f"{signed}.{encoded(_sign(key, signed.encode()))}"


def _payload(claims: Claims, flaws: frozenset[Flaw]) -> dict[str, object]:
    now = int(time.time())
    issued = now - LONG_AGO_S if Flaw.EXPIRED in flaws else now
    payload: dict[str, object] = {
        "iss": "somebody-else" if Flaw.WRONG_ISSUER in flaws else claims.issuer,
        "aud": "something-else" if Flaw.WRONG_AUDIENCE in flaws else claims.audience,
        "sub": claims.subject,
        "iat": issued,
        "exp": issued + (min(claims.ttl_s, LONG_AGO_S // 2) if Flaw.EXPIRED in flaws else claims.ttl_s),
    }
    if claims.scope:
        payload["scope"] = claims.scope
    if claims.namespace:
        payload[claims.namespace_claim] = claims.namespace
    if Flaw.NOT_YET in flaws:
        payload["nbf"] = now + LONG_AGO_S
        payload["exp"] = now + 2 * LONG_AGO_S
    for flaw, name in ((Flaw.NO_EXPIRY, "exp"), (Flaw.NO_AUDIENCE, "aud"), (Flaw.NO_SUBJECT, "sub")):
        if flaw in flaws:
            del payload[name]
    return payload


def _sign(key: PrivateKey, message: bytes) -> bytes:
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(message, padding.PKCS1v15(), hashes.SHA256())
    if isinstance(key, ec.EllipticCurvePrivateKey):
        # JOSE wants the two numbers side by side, not the DER that cryptography gives (RFC 7518 §3.4).
        r, s = decode_dss_signature(key.sign(message, ec.ECDSA(hashes.SHA256())))
        return r.to_bytes(_P256_BYTES, "big") + s.to_bytes(_P256_BYTES, "big")
    return key.sign(message)


def _public_pem(key: PrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _json(value: dict[str, str] | dict[str, object]) -> str:
    return encoded(msgspec.json.encode(value))
