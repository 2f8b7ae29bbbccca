"""Names of others on a terminal: nothing that it obeys, and JSON that still means the same."""

from __future__ import annotations

import json
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from headwater.printable import printable, printable_json


def test_control_characters_become_visible() -> None:
    assert printable("a\x1b[2Jb\nc\x9b\u202ed") == r"a\x1b[2Jb\nc\x9b\u202ed"
    assert printable("ünï 日本 🙂") == "ünï 日本 🙂"


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    assert not any(unicodedata.category(character) == "Cc" for character in printable(text))
    line = printable_json(json.dumps(text, ensure_ascii=False))
    assert not any(unicodedata.category(character) == "Cc" for character in line)
    assert json.loads(line) == text
