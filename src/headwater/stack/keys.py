"""The keys that sign test tokens: made on first use, kept in one directory, published as a JWKS, rotated.

Invariant: of each algorithm exactly one key is current and signs; keys before it stay published until they are
retired, so that a rotation refuses nobody. `ring.json` is replaced whole, so a reader sees one state or the next.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

PrivateKey: TypeAlias = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey

RSA_BITS: Final = 2048
_P256_BYTES: Final = 32


class Algorithm(StrEnum):
    """What Envoy is asked to accept; anything else is refused whatever its signature."""

    RS256 = "RS256"
    ES256 = "ES256"
    EDDSA = "EdDSA"


class KeyEntry(msgspec.Struct, frozen=True):
    """One key of the ring. Its PEM file is named after its id."""

    kid: str
    alg: str
    created: int
    current: bool
    jwk: dict[str, str]


class _Ring(msgspec.Struct, frozen=True):
    keys: list[KeyEntry]


class KeyRing:
    """The keys of one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def jwks_file(self) -> Path:
        """The public half, for whoever validates tokens."""
        return self.directory / "jwks.json"

    def ensure(self) -> None:
        """Make the keys unless they are there."""
        with self._locked():
            if not self._ring_file.exists():
                self._write([self._make(algorithm) for algorithm in Algorithm])

    def entries(self) -> list[KeyEntry]:
        self.ensure()
        return self._read()

    def signing_key(self, algorithm: Algorithm) -> tuple[str, PrivateKey]:
        """The current key of an algorithm, and its id."""
        entry = next(entry for entry in self.entries() if entry.alg == algorithm and entry.current)
        loaded = serialization.load_pem_private_key(self._pem(entry.kid).read_bytes(), password=None)
        assert isinstance(loaded, rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey)
        return entry.kid, loaded

    def rotate(self) -> None:
        """New current keys; the ones before stay published, so that their tokens go on working."""
        self.ensure()
        with self._locked():
            before = [msgspec.structs.replace(entry, current=False) for entry in self._read()]
            self._write([self._make(algorithm) for algorithm in Algorithm] + before)

    def retire(self) -> int:
        """Drop every key but the current ones, and say how many: tokens that they signed end here."""
        self.ensure()
        with self._locked():
            entries = self._read()
            old = [entry for entry in entries if not entry.current]
            self._write([entry for entry in entries if entry.current])
            for entry in old:
                self._pem(entry.kid).unlink(missing_ok=True)
        return len(old)

    @property
    def _ring_file(self) -> Path:
        return self.directory / "ring.json"

    def _pem(self, kid: str) -> Path:
        return self.directory / f"{kid}.pem"

    def _read(self) -> list[KeyEntry]:
        return msgspec.json.decode(self._ring_file.read_bytes(), type=_Ring).keys

    def _write(self, entries: list[KeyEntry]) -> None:
        # The published half first: a token is never signed with a key that nobody can look up.
        jwks = {"keys": [entry.jwk for entry in entries]}
        replace_file(self.jwks_file, msgspec.json.format(msgspec.json.encode(jwks)), 0o644)
        replace_file(self._ring_file, msgspec.json.encode(_Ring(entries)), 0o600)

    def _make(self, algorithm: Algorithm) -> KeyEntry:
        key = new_key(algorithm)
        numbers = public_numbers(key)
        kid = thumbprint(numbers)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        replace_file(self._pem(kid), pem, 0o600)
        jwk = {**numbers, "kid": kid, "alg": algorithm.value, "use": "sig"}
        return KeyEntry(kid, algorithm.value, int(time.time()), True, jwk)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Two commands that both find no keys must not make two rings."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.directory.stat().st_mode & 0o077:
            # Somebody else made it, or a wide umask.
            self.directory.chmod(0o700)
        with (self.directory / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def new_key(algorithm: Algorithm) -> PrivateKey:
    match algorithm:
        case Algorithm.RS256:
            return rsa.generate_private_key(public_exponent=65537, key_size=RSA_BITS)
        case Algorithm.ES256:
            return ec.generate_private_key(ec.SECP256R1())
        case Algorithm.EDDSA:
            return ed25519.Ed25519PrivateKey.generate()


def public_numbers(key: PrivateKey) -> dict[str, str]:
    """The members of a JWK that are the key itself (RFC 7517, 8037)."""
    if isinstance(key, rsa.RSAPrivateKey):
        rsa_public = key.public_key().public_numbers()
        return {"kty": "RSA", "n": _integer(rsa_public.n), "e": _integer(rsa_public.e)}
    if isinstance(key, ec.EllipticCurvePrivateKey):
        point = key.public_key().public_numbers()
        return {
            "kty": "EC",
            "crv": "P-256",
            "x": encoded(point.x.to_bytes(_P256_BYTES, "big")),
            "y": encoded(point.y.to_bytes(_P256_BYTES, "big")),
        }
    raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return {"kty": "OKP", "crv": "Ed25519", "x": encoded(raw)}


def thumbprint(numbers: Mapping[str, str]) -> str:
    """A name for a key that follows from the key itself (RFC 7638)."""
    canonical = msgspec.json.encode(dict(sorted(numbers.items())))
    return encoded(hashlib.sha256(canonical).digest())


def encoded(raw: bytes) -> str:
    """Base64url without padding, as JOSE writes everything."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")


def _integer(value: int) -> str:
    return encoded(value.to_bytes((value.bit_length() + 7) // 8, "big"))


def replace_file(path: Path, content: bytes, mode: int) -> None:
    """Write a file so that readers find the old content or the new, and nobody else reads a private one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    temporary.replace(path)
