"""Signatures and tokens, verified with the public key only, as a receiver does."""

from __future__ import annotations

from base64 import urlsafe_b64decode

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.signing import (
    JWKS_MAX_AGE_S,
    PUBLISHED_AFTER_MS,
    SavedKey,
    SigningKey,
    WakeToken,
    current_key,
    decode_key,
    encode_key,
    jwk,
    make_token,
    outlived,
    read_token,
)
from headwater.core.subscription_errors import TokenInvalid

SECRET = bytes(range(32))


def unpadded(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))


def key(number: int, active_from_ms: int = 0) -> SigningKey:
    return SigningKey(SavedKey(bytes([number]) * 32, active_from_ms, active_from_ms))


def test_a_signature_is_over_time_and_body_and_names_its_key() -> None:
    signing = key(1)
    header = signing.sign(b'{"a":1}', 1_700_000_000)
    fields = dict(part.split("=", 1) for part in header.split(","))
    assert list(fields) == ["t", "kid", "ed25519"]
    assert fields["t"] == "1700000000"
    published = jwk(signing.public)
    assert fields["kid"] == published["kid"]
    public = Ed25519PublicKey.from_public_bytes(unpadded(published["x"]))
    public.verify(unpadded(fields["ed25519"]), b'1700000000.{"a":1}')
    with pytest.raises(InvalidSignature):
        public.verify(unpadded(fields["ed25519"]), b'1700000001.{"a":1}')


def test_the_kid_is_the_thumbprint_of_rfc_8037() -> None:
    """The key of RFC 8037, appendix A, and its thumbprint from there."""
    seed = unpadded("nWGxne_9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A")
    signing = SigningKey(SavedKey(seed, 0, 0))
    assert signing.public.x == "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"
    assert signing.public.kid == "ds_kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"


def test_key_is_loaded_from_its_saved_form_and_shows_nothing_private() -> None:
    saved = SavedKey(b"\x07" * 32, 5, 6)
    assert decode_key(encode_key(saved)) == saved
    signing = SigningKey(saved)
    assert set(jwk(signing.public)) == {"kty", "crv", "x", "kid", "use", "alg"}
    assert "07" * 16 not in repr(signing) + repr(signing.public) + str(jwk(signing.public))


def test_new_key_signs_from_its_start_and_the_old_one_is_removed_later() -> None:
    old, new = key(1, 0), key(2, JWKS_MAX_AGE_S * 1000)
    assert current_key([old, new], new.active_from_ms - 1) is old
    assert current_key([old, new], new.active_from_ms) is new
    gone_ms = new.active_from_ms + PUBLISHED_AFTER_MS
    assert outlived([old, new], gone_ms - 1) == []
    assert outlived([old, new], gone_ms) == [old]
    assert outlived([new], 10**15) == [], "the last key is never removed"


def test_the_first_key_signs_even_before_its_time() -> None:
    """There must still be a key after the clock was set back."""
    only = key(1, 1_000)
    assert current_key([only], 0) is only


ids = st.text(st.characters(min_codepoint=0x20, exclude_categories=["Cs"]), min_size=1, max_size=20)
tokens = st.builds(WakeToken, st.integers(0, 2**53), st.from_regex(r"w_[0-9a-f]{24}", fullmatch=True))


@given(ids, tokens)
def test_token_contains_its_wake(subscription: str, token: WakeToken) -> None:
    assert read_token(SECRET, subscription, make_token(SECRET, subscription, token)) == token


@given(ids, ids, tokens, tokens)
def test_a_token_is_for_one_subscription_and_wake(mine: str, other: str, token: WakeToken, another: WakeToken) -> None:
    text = make_token(SECRET, mine, token)
    mac = text.rsplit(".", 1)[1]
    if other != mine:
        with pytest.raises(TokenInvalid):
            read_token(SECRET, other, text)
    if another != token:
        with pytest.raises(TokenInvalid):
            read_token(SECRET, mine, f"{another.generation}.{another.wake_id}.{mac}")
    with pytest.raises(TokenInvalid):
        read_token(bytes(32), mine, text)


@pytest.mark.parametrize(
    "text", ["", ".", "..", "1.w", "1.w.", "x.w_1.abc", "-1.w.a", "9" * 40 + ".w.a", "1.w.é", "٣.w.a"]
)
def test_malformed_token_is_refused(text: str) -> None:
    with pytest.raises(TokenInvalid):
        read_token(SECRET, "s", text)
