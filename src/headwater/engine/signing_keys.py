"""The server's signing keys and its token secret: created when first needed, stored as documents, never exposed.

A key is durable no later than anything that was signed with it, because both pass through the commit queue in
order. So a crash cannot lose a key whose signature a receiver already has.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Final

from headwater.core.errors import Refusal
from headwater.core.signing import (
    JWKS_MAX_AGE_S,
    SEED_BYTES,
    PublicKey,
    SavedKey,
    SigningKey,
    current_key,
    decode_key,
    encode_key,
    outlived,
)
from headwater.engine.stream_host import StreamHost

KEY_PREFIX: Final = "signing-key/"
SECRET_KEY: Final = "token-secret"


class SigningKeys:
    def __init__(self, engine: StreamHost, rotation_ms: int = 0) -> None:
        """`rotation_ms` is the age at which a key is replaced; 0 means never."""
        self._engine = engine
        self._rotation_ms = rotation_ms
        self._keys: list[SigningKey] = []
        self._secret: bytes | None = None

    def start(self) -> None:
        documents = self._engine.catalog.documents
        saved = [decode_key(value) for key, value in documents.items() if key.startswith(KEY_PREFIX)]
        self._keys = sorted((SigningKey(key) for key in saved), key=lambda key: key.active_from_ms)
        self._secret = documents.get(SECRET_KEY)

    def secret(self) -> bytes:
        """The secret that signs tokens."""
        if self._secret is None:
            secret = secrets.token_bytes(SEED_BYTES)
            self._engine.put_document(SECRET_KEY, secret, None, None)
            self._secret = secret
        return self._secret

    def current(self) -> SigningKey:
        """The key that signs now; the first call creates one."""
        now_ms = self._engine.now_ms()
        if not self._keys:
            self._add(SavedKey(secrets.token_bytes(SEED_BYTES), now_ms, now_ms))
        elif self._rotation_ms and self._keys[-1].created_ms + self._rotation_ms <= now_ms:
            # While storage refuses writes, the existing key still signs.
            with suppress(Refusal):
                self.rotate()
        return current_key(self._keys, now_ms)

    def rotate(self) -> SigningKey:
        """Create a new key. It is published at once, and signs when every cached key set contains it."""
        now_ms = self._engine.now_ms()
        active_from_ms = now_ms + JWKS_MAX_AGE_S * 1000 if self._keys else now_ms
        self._prune(now_ms)
        return self._add(SavedKey(secrets.token_bytes(SEED_BYTES), now_ms, active_from_ms))

    def published(self) -> list[PublicKey]:
        """The public keys that receivers may need, newest first."""
        expired = set(outlived(self._keys, self._engine.now_ms()))
        return [key.public for key in reversed(self._keys) if key not in expired]

    def _add(self, saved: SavedKey) -> SigningKey:
        key = SigningKey(saved)
        self._engine.put_document(KEY_PREFIX + key.public.kid, encode_key(saved), None, None)
        self._keys.append(key)
        return key

    def _prune(self, now_ms: int) -> None:
        for key in outlived(self._keys, now_ms):
            self._engine.put_document(KEY_PREFIX + key.public.kid, None, None, None)
            self._keys.remove(key)
