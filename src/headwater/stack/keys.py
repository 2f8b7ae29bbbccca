"""Signing keys of the stack: created on first use, stored in one directory, published as a JWKS, rotated.

Invariant: each algorithm has exactly one current key, which signs. Earlier keys stay published until they are retired,
so that a rotation invalidates no token. `ring.json` is replaced as a whole: a reader sees the old state or the new one.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

if TYPE_CHECKING:
    from joserfc.jwk import ECKey, OKPKey, RSAKey

    PrivateKey: TypeAlias = RSAKey | ECKey | OKPKey

RSA_BITS: Final = 2048


class Algorithm(StrEnum):
    """Signature algorithms that Envoy accepts. Envoy rejects tokens with any other algorithm."""

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


_rings: Final = msgspec.json.Decoder(_Ring)


class KeyRing:
    """The keys in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def jwks_file(self) -> Path:
        """The public keys, for the services that validate tokens."""
        return self.directory / "jwks.json"

    def ensure(self) -> None:
        """Create the keys if there are none."""
        with self._locked():
            if not self._ring_file.exists():
                self._write([self._create(algorithm) for algorithm in Algorithm])

    def entries(self) -> list[KeyEntry]:
        self.ensure()
        return self._read()

    def signing_key(self, algorithm: Algorithm) -> tuple[str, PrivateKey]:
        """Return the current key of an algorithm, with its id."""
        entry = next(entry for entry in self.entries() if entry.alg == algorithm and entry.current)
        return entry.kid, _load_key(algorithm, self._pem(entry.kid).read_bytes())

    def rotate(self) -> None:
        """Create new current keys. The previous keys stay published, so their tokens stay valid."""
        self.ensure()
        with self._locked():
            previous = [msgspec.structs.replace(entry, current=False) for entry in self._read()]
            self._write([self._create(algorithm) for algorithm in Algorithm] + previous)

    def retire(self) -> int:
        """Delete all keys but the current ones and return their number. Tokens that they signed become invalid."""
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
        return _rings.decode(self._ring_file.read_bytes()).keys

    def _write(self, entries: list[KeyEntry]) -> None:
        # Public keys first, so that no token is signed with a key that is not published yet.
        jwks = {"keys": [entry.jwk for entry in entries]}
        replace_file(self.jwks_file, msgspec.json.format(msgspec.json.encode(jwks)), 0o644)
        replace_file(self._ring_file, msgspec.json.encode(_Ring(entries)), 0o600)

    def _create(self, algorithm: Algorithm) -> KeyEntry:
        key = new_key(algorithm)
        kid = key.thumbprint()
        replace_file(self._pem(kid), key.as_pem(private=True), 0o600)
        jwk = msgspec.convert(key.as_dict(private=False), dict[str, str])
        return KeyEntry(kid, algorithm.value, int(time.time()), True, jwk)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the directory, so that two commands cannot both create a ring."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.directory.stat().st_mode & 0o077:
            # The directory existed before, or the umask was too permissive.
            self.directory.chmod(0o700)
        with (self.directory / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def new_key(algorithm: Algorithm) -> PrivateKey:
    from joserfc.jwk import ECKey, KeyParameters, OKPKey, RSAKey  # noqa: PLC0415  (slow, and few commands need it)

    parameters: KeyParameters = {"alg": algorithm.value, "use": "sig"}
    match algorithm:
        case Algorithm.RS256:
            return RSAKey.generate_key(RSA_BITS, parameters, auto_kid=True)
        case Algorithm.ES256:
            return ECKey.generate_key("P-256", parameters, auto_kid=True)
        case Algorithm.EDDSA:
            return OKPKey.generate_key("Ed25519", parameters, auto_kid=True)


def _load_key(algorithm: Algorithm, pem: bytes) -> PrivateKey:
    from joserfc.jwk import ECKey, OKPKey, RSAKey  # noqa: PLC0415

    match algorithm:
        case Algorithm.RS256:
            return RSAKey.import_key(pem)
        case Algorithm.ES256:
            return ECKey.import_key(pem)
        case Algorithm.EDDSA:
            return OKPKey.import_key(pem)


def replace_file(path: Path, content: bytes, mode: int) -> None:
    """Replace a file atomically. The new file never has wider permissions than `mode`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    temporary.replace(path)
