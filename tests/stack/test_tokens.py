"""Keys and tokens without Envoy: creation, storage, permissions, rotation, and the flaws of test tokens."""

from __future__ import annotations

import base64
import json
import re
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from headwater.cli.up import next_steps
from headwater.config import load_settings
from headwater.stack.keys import Algorithm, KeyRing
from headwater.stack.profiles import Profile
from headwater.stack.state import StackDirectory
from headwater.stack.tokens import TokenClaims, TokenFlaw, mint
from tests.serving import server_environment

CLAIMS = TokenClaims("the-issuer", "the-audience", subject="alice")


def decoded(part: str) -> bytes:
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


def parts(token: str) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    header, payload, signature = token.split(".")
    return json.loads(decoded(header)), json.loads(decoded(payload)), decoded(signature)


def verify(token: str, jwks: dict[str, Any]) -> None:
    """Check a token against published keys, independently of our code; raises InvalidSignature or StopIteration."""
    header, _, signature = parts(token)
    jwk = next(key for key in jwks["keys"] if key["kid"] == header["kid"])
    assert jwk["alg"] == header["alg"]
    signed = token.rpartition(".")[0].encode()
    number = {name: int.from_bytes(decoded(jwk[name]), "big") for name in ("n", "e", "x", "y") if name in jwk}
    match header["alg"]:
        case "RS256":
            rsa_key = rsa.RSAPublicNumbers(number["e"], number["n"]).public_key()
            rsa_key.verify(signature, signed, padding.PKCS1v15(), hashes.SHA256())
        case "ES256":
            ec_key = ec.EllipticCurvePublicNumbers(number["x"], number["y"], ec.SECP256R1()).public_key()
            r, s = int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:], "big")
            ec_key.verify(encode_dss_signature(r, s), signed, ec.ECDSA(hashes.SHA256()))
        case _:
            ed25519.Ed25519PublicKey.from_public_bytes(decoded(jwk["x"])).verify(signature, signed)


def jwks_of(ring: KeyRing) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(ring.jwks_file.read_text())
    return loaded


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> KeyRing:
    ring = KeyRing(tmp_path_factory.mktemp("keys"))
    ring.ensure()
    return ring


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_a_token_is_verified_by_the_published_key(ring: KeyRing, algorithm: Algorithm) -> None:
    token = mint(ring, CLAIMS, algorithm)
    verify(token, jwks_of(ring))
    _, payload, _ = parts(token)
    assert payload["iss"] == "the-issuer"
    assert payload["aud"] == "the-audience"
    assert payload["sub"] == "alice"
    assert payload["exp"] - payload["iat"] == 3600
    assert "scope" not in payload
    assert "ns" not in payload


def test_private_keys_are_readable_only_by_their_owner_and_not_published(ring: KeyRing) -> None:
    for path in ring.directory.glob("*.pem"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(list(ring.directory.glob("*.pem"))) == len(Algorithm)
    for key in jwks_of(ring)["keys"]:
        assert not {"d", "p", "q", "dp", "dq", "qi", "k"} & key.keys()


def test_keys_are_created_once(ring: KeyRing) -> None:
    before = jwks_of(ring)
    ring.ensure()
    assert jwks_of(ring) == before


@pytest.mark.parametrize("flaw", [TokenFlaw.FOREIGN_KEY, TokenFlaw.TAMPERED])
@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_token_with_a_wrong_signature_has_the_key_id_of_a_valid_one(
    ring: KeyRing, flaw: TokenFlaw, algorithm: Algorithm
) -> None:
    token = mint(ring, CLAIMS, algorithm, frozenset({flaw}))
    with pytest.raises(InvalidSignature):
        verify(token, jwks_of(ring))


def test_tokens_with_other_flaws_have_a_valid_signature(ring: KeyRing) -> None:
    now = time.time()
    for flaw, wrong in (
        (TokenFlaw.EXPIRED, lambda payload: payload["exp"] < now - 600),
        (TokenFlaw.NO_EXPIRY, lambda payload: "exp" not in payload),
        (TokenFlaw.NOT_YET, lambda payload: payload["nbf"] > now + 600),
        (TokenFlaw.WRONG_ISSUER, lambda payload: payload["iss"] != "the-issuer"),
        (TokenFlaw.WRONG_AUDIENCE, lambda payload: payload["aud"] != "the-audience"),
        (TokenFlaw.NO_AUDIENCE, lambda payload: "aud" not in payload),
        (TokenFlaw.NO_SUBJECT, lambda payload: "sub" not in payload),
    ):
        token = mint(ring, CLAIMS, Algorithm.ES256, frozenset({flaw}))
        verify(token, jwks_of(ring))
        assert wrong(parts(token)[1]), flaw


def test_old_tokens_stay_valid_after_a_rotation_until_old_keys_are_retired(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path)
    old = mint(ring, CLAIMS, Algorithm.EDDSA)
    ring.rotate()
    new = mint(ring, CLAIMS, Algorithm.EDDSA)
    assert parts(old)[0]["kid"] != parts(new)[0]["kid"]
    verify(old, jwks_of(ring))
    verify(new, jwks_of(ring))
    assert ring.retire() == len(Algorithm)
    verify(new, jwks_of(ring))
    with pytest.raises(StopIteration):
        verify(old, jwks_of(ring))
    assert len(list(tmp_path.glob("*.pem"))) == len(Algorithm)


def run_token(tmp_path: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headwater", "token", *arguments],
        cwd=tmp_path,
        env=server_environment(**env),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_command_prints_only_a_token(tmp_path: Path) -> None:
    done = run_token(
        tmp_path, "--sub", "bob", "--scope", "streams:read", "--scope", "streams:write", "--ns", "team-a", "--ttl", "60"
    )
    assert done.returncode == 0, done.stderr
    assert "created keys in data/stack/keys" in done.stderr
    assert run_token(tmp_path).stderr == "", "the keys are there now"
    _, payload, _ = parts(done.stdout.strip())
    assert payload["sub"] == "bob"
    assert payload["scope"] == "streams:read streams:write"
    assert payload["ns"] == "team-a"
    assert payload["iss"] == "durable-streams-test"
    assert payload["aud"] == "durable-streams"
    verify(done.stdout.strip(), jwks_of(KeyRing(tmp_path / "data/stack/keys")))


def test_the_command_rotates_and_prints_public_keys(tmp_path: Path) -> None:
    assert run_token(tmp_path, "--data-dir", "there", "--rotate").returncode == 0
    shown = run_token(tmp_path, "--data-dir", "there", "--jwks")
    assert len(json.loads(shown.stdout)["keys"]) == 2 * len(Algorithm)


def test_link_of_the_dev_profile_allows_what_its_page_reads(tmp_path: Path) -> None:
    """The list of streams and the state of the pipeline have reserved names, which need the scope."""
    directory = StackDirectory(tmp_path)
    settings = load_settings(None, None, {}, tmp_path).settings
    [link] = re.findall(r"http://localhost:8080/ui/#/\?token=(\S+)", next_steps(settings, directory, Profile.DEV)[0])
    verify(link, jwks_of(KeyRing(directory.keys)))
    _, claims, _ = parts(link)
    assert claims["scope"] == "streams:admin"
    assert claims["exp"] - claims["iat"] == 3600, "as the text says"
    for profile in (Profile.DEFAULT, Profile.SYNC):
        [printed] = re.findall(r"\((.+)\)", next_steps(settings, directory, profile)[0])
        assert printed == "it asks for a token; `headwater token --scope streams:admin` creates one"


def test_command_creates_no_tokens_for_an_identity_provider(tmp_path: Path) -> None:
    done = run_token(tmp_path, DS_AUTH__JWKS_URL="https://id.example.com/jwks.json")
    assert done.returncode == 2
    assert "id.example.com" in done.stderr
    assert not (tmp_path / "data").exists()
