"""Stream names: decoded once, in one canonical form; ambiguous paths are refused (§10.2, T-29)."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headwater.core.errors import InvalidName, Refusal
from headwater.core.names import canonical_name, check_name

MAX_BYTES = 122


def name_of(path: bytes | str) -> str:
    return canonical_name(path.encode() if isinstance(path, str) else path, MAX_BYTES)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a", "a"),
        ("a/b/c", "a/b/c"),
        ("%61", "a"),
        ("%41%62", "Ab"),
        ("a%20b", "a b"),
        ("a+b", "a+b"),
        ("%e2%82%ac", "€"),
        ("%E2%82%AC", "€"),
        ("€", "€"),
        ("%25", "%"),
        ("%2525", "%25"),
        ("%252e%252e", "%2e%2e"),
        ("%252f", "%2f"),
        ("a%3Fb", "a?b"),
        ("a%23b", "a#b"),
        ("...", "..."),
        ("a/.b", "a/.b"),
        ("a/b..", "a/b.."),
        ("%c2%85", "\u0085"),
        ("%e2%80%a8", "\u2028"),
        ("__dsx", "__dsx"),
        ("a/__ds", "a/__ds"),
        ("__registry__", "__registry__"),
        ("streams", "streams"),
    ],
)
def test_a_path_is_decoded_exactly_once(path: str, name: str) -> None:
    assert name_of(path) == name


def test_case_is_kept() -> None:
    assert name_of("A") != name_of("a")


def test_two_spellings_of_one_name_are_one_name() -> None:
    assert name_of("a/%62/c%2D%7e") == name_of("a/b/c-~") == name_of("%61/b/c-%7E")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/a",
        "a/",
        "a//b",
        "//",
        ".",
        "..",
        "a/..",
        "a/../b",
        "./a",
        "a/.",
        "%2e",
        "%2E%2e",
        ".%2e",
        "a/%2e%2e/b",
        "%2e/a",
        "%2fa",
        "a%2F",
        "a%2f%2fb",
        "a%2f/b",
        "a%2F..%2Fb",
        "a%2f%2e%2e%2fb",
        "__ds%2Fjwks.json",
        "a%5cb",
        "a%5Cb",
        "a\\b",
        "%00",
        "a%00b",
        "a%0ab",
        "a%0Db",
        "a%1f",
        "a%7F",
        "a\x00b",
        "a\x1fb",
        "a\x7fb",
        "%",
        "a%",
        "a%2",
        "a%zz",
        "a%2 ",
        "a%-1",
        "a%+1",
        "a% 1",
        "a%%61",
        "%u0061",
        "__ds",
        "__ds/subscriptions/x",
        "%5f%5fds",
        "%5F_ds/jwks.json",
    ],
)
def test_ambiguous_path_is_refused(path: str) -> None:
    with pytest.raises(InvalidName):
        name_of(path)


@pytest.mark.parametrize(
    "path", [b"\xff", b"%ff", b"%c3", b"a%c3%28", b"%c0%af", b"%c0%ae%c0%ae", b"%ed%a0%80", b"%f5%80%80%80"]
)
def test_a_name_that_is_not_utf_8_is_refused(path: bytes) -> None:
    with pytest.raises(InvalidName):
        name_of(path)


@pytest.mark.parametrize("letter", ["a", "€", "%61", "%e2%82%ac"])
def test_the_limit_counts_bytes_of_the_decoded_name(letter: str) -> None:
    size = len(name_of(letter).encode())
    fits = MAX_BYTES // size
    assert len(name_of(letter * fits).encode()) <= MAX_BYTES
    with pytest.raises(InvalidName):
        name_of(letter * (fits + 1))


@given(st.text(max_size=60))
def test_a_name_is_its_own_canonical_form(text: str) -> None:
    """Quoting an accepted name and parsing it again gives the same name."""
    try:
        name = check_name(text, MAX_BYTES)
    except InvalidName:
        return
    if any("\ud800" <= character <= "\udfff" for character in name):
        return  # No path decodes to a lone surrogate, so only `check_name` can receive one.
    assert name_of(quote(name, safe="/")) == name


@given(st.binary(max_size=60))
@example(b"%2e%2e/%2e%2e/etc/passwd")
@example(b"a/%2E./b")
def test_any_path_gives_a_safe_name_or_a_refusal(path: bytes) -> None:
    try:
        name = canonical_name(path, MAX_BYTES)
    except Refusal:
        return
    assert 0 < len(name.encode()) <= MAX_BYTES
    assert not {"", ".", ".."} & set(name.split("/"))
    assert not any(character < " " or character in {"\x7f", "\\"} for character in name)
    assert name.split("/")[0] != "__ds"
