"""The modules of the page that have no user interface, tested in Chromium."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser

from tests.serving import Server
from tests.ui.conftest import watching
from tests.ui.pages import JSON, TEXT, Pages, post, put


@pytest.fixture(scope="module")
def ui(browser: Browser, ui_server: Server) -> Iterator[Pages]:
    """One empty page for all tests."""
    with watching(browser) as watched:
        pages = Pages(watched.page(), ui_server.url)
        pages.open()
        yield pages


def run(ui: Pages, module: str, expression: str, argument: Any = None) -> Any:
    """Evaluate an expression over a module `m` and an argument `x`."""
    script = f"async (x) => {{ const m = await import('/ui/js/{module}.js'); return {expression}; }}"
    return ui.page.evaluate(script, argument)


@pytest.mark.parametrize(
    ("text", "elements"),
    [
        ("[]", []),
        (" [ ] ", []),
        ("[1]", ["1"]),
        ('[{"a":[1,2]}, "x,]y" ,null]', ['{"a":[1,2]}', ' "x,]y" ', "null"]),
        (r'["\"","\\",","]', [r'"\""', r'"\\"', '","']),
        ("[[],[[]],{}]", ["[]", "[[]]", "{}"]),
    ],
)
def test_array_is_split_into_its_unparsed_elements(ui: Pages, text: str, elements: list[str]) -> None:
    assert run(ui, "json", "m.split(x)", text) == elements


def test_numbers_keys_and_repeats_survive(ui: Pages) -> None:
    text = '{"id":9007199254740993,"b":1.0,"a":1e3,"a":"twice","__proto__":{"x":1}}'
    assert run(ui, "json", "m.print(m.parse(x))", text) == text


@pytest.mark.parametrize("text", ["", "{", '{"a":}', "[1,]", "nul", "01", '"open', "1 2", "NaN", "{'a':1}"])
def test_malformed_json_is_marked(ui: Pages, text: str) -> None:
    script = """async (x) => { const m = await import('/ui/js/json.js');
        try { m.parse(x); return 'parsed'; } catch (error) { return error.name; } }"""
    assert ui.page.evaluate(script, text) == "SyntaxError"


def any_json(chance: random.Random, depth: int = 0) -> Any:
    kinds = ["text", "int", "word"] if depth > 3 else ["text", "int", "word", "list", "dict"]
    kind = chance.choice(kinds)
    if kind == "text":
        return "".join(chance.choice('ab",[]{}\\/é☃😀\n\t ') for _ in range(chance.randrange(6)))
    if kind == "int":
        return chance.randrange(-(10**20), 10**20)
    if kind == "word":
        return chance.choice([True, False, None])
    if kind == "list":
        return [any_json(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {str(any_json(chance, 9)): any_json(chance, depth + 1) for _ in range(chance.randrange(4))}


def test_any_array_is_split_correctly(ui: Pages) -> None:
    chance = random.Random(7)
    for style in ({}, {"indent": 1}, {"ensure_ascii": False, "separators": (",", ":")}):
        arrays = [[any_json(chance) for _ in range(chance.randrange(5))] for _ in range(60)]
        texts = [json.dumps(array, **style) for array in arrays]
        cut = run(ui, "json", "x.map((text) => m.split(text))", texts)
        assert [[json.loads(piece) for piece in pieces] for pieces in cut] == arrays


def test_events_are_the_same_for_any_split_into_chunks(ui: Pages) -> None:
    text = (
        ": hello\nevent: data\ndata:[1]\ndata: two\n\nevent:control\r\ndata:{}\r\n\r\n"
        "data: spaced\rdata:  twice\r\rid: 7\nevent: lost\n\ndata\n\n"
    )
    expected = [
        {"event": "data", "data": "[1]\ntwo"},
        {"event": "control", "data": "{}"},
        {"event": "message", "data": "spaced\n twice"},
        {"event": "message", "data": ""},
    ]
    feed = "x.reduce((seen, piece) => seen.concat(m.parser.feed(piece)), [])"
    for size in (1, 2, 3, 7, 1000):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        got = run(ui, "sse", f"(m => {feed})({{parser: new m.EventParser()}})", pieces)
        assert got == expected, size


def test_multipart_parts_keep_their_bytes(ui: Pages) -> None:
    body = (
        b"--b1\r\nContent-Type: application/octet-stream\r\n\r\n\r\n--b1\r\n"
        b"content-type: application/json\r\n\r\n" + b'{"a":"--b1"}\r\n' + b"\r\n--b1--\r\n"
    )
    got = run(
        ui,
        "multipart",
        "m.parts(Uint8Array.from(x), m.boundaryOf('multipart/mixed; boundary=b1')).map((p) => [p.type, [...p.data]])",
        list(body),
    )
    assert got == [["application/octet-stream", []], ["application/json", list(b'{"a":"--b1"}\r\n')]]


def fold(ui: Pages, events: list[Any]) -> dict[str, dict[str, Any]]:
    script = """async (x) => { const m = await import('/ui/js/fold.js'); const json = await import('/ui/js/json.js');
        const fold = new m.Fold();
        for (const event of x) fold.apply(json.parse(event), {});
        const rows = (table) => [...table].map(([key, entity]) => [key, json.print(entity.value)]);
        return [...fold.tables].map(([type, table]) => [type, rows(table)]); }"""
    tables = ui.page.evaluate(script, [json.dumps(event) for event in events])
    return {type_: {key: json.loads(value) for key, value in rows} for type_, rows in tables}


def test_state_events_fold_to_state(ui: Pages) -> None:
    def change(operation: str, key: str, value: Any = None) -> dict[str, Any]:
        return {"type": "user", "key": key, "value": value, "headers": {"operation": operation}}

    events = [change("insert", "1", {"n": 1}), change("insert", "2", {"n": 2}), change("update", "1", {"n": 3})]
    assert fold(ui, events) == {"user": {"1": {"n": 3}, "2": {"n": 2}}}
    assert fold(ui, [*events, change("delete", "2")]) == {"user": {"1": {"n": 3}}}
    assert fold(ui, [*events, {"headers": {"control": "reset"}}, change("upsert", "9", 1)]) == {"user": {"9": 1}}


def test_session_events_fold_to_state(ui: Pages) -> None:
    events = [
        {"type": "presence", "key": "alice", "operation": "set", "value": {"status": "online"}},
        {"type": "presence", "key": "bob", "operation": "set", "value": {"status": "online"}},
        {"type": "presence", "key": "bob", "operation": "remove"},
        {"type": "chunk", "key": "m", "operation": "append", "value": {"text": "Hel", "from": "ai"}},
        {"type": "chunk", "key": "m", "operation": "append", "value": {"text": "lo", "from": "ai"}},
        "no event",
        {"type": "odd", "key": "k", "operation": "explode"},
    ]
    assert fold(ui, events) == {
        "presence": {"alice": {"status": "online"}},
        "chunk": {"m": {"text": "Hello", "from": "ai"}},
    }


@pytest.mark.parametrize("headers", [JSON, TEXT], ids=["json", "text"])
def test_every_message_has_the_offset_of_the_server(ui: Pages, http: httpx.Client, headers: dict[str, str]) -> None:
    name = f"offsets-{headers['Content-Type'].partition('/')[2]}"
    put(http, name, headers)
    bodies = ['{"snow":"☃"}', ' [1, {"a" : "😀"}]', '"é"'] if headers is JSON else ["one", "zwei ☃", "😀"]
    ends = [post(http, name, body.encode(), headers) for body in bodies]
    script = """async (name) => {
        const { StreamReader } = await import('/ui/js/reader.js');
        const { Address } = await import('/ui/js/client.js');
        const seen = [];
        await new Promise((resolve) => {
            const reader = new StreamReader(window.headwater.client, new Address(name), {
                onmessages: (messages) => seen.push(...messages),
                onstate: (reader) => { if (reader.state === 'live') { reader.stop(); resolve(); } },
            }).start();
        });
        return seen.map((message) => [message.text, message.start, message.end]);
    }"""
    seen = ui.page.evaluate(script, name)
    got = [end for _, _, end in seen]
    assert set(ends) <= set(got)
    assert got[-1] == ends[-1]
    for (_, _, end), (_, start, _) in itertools.pairwise(seen):
        assert end == start
    for text, start, end in seen:
        body = http.get(f"/v1/stream/{name}", params={"offset": start, "until": end}).content.decode()
        assert (f"[{text}]" if headers is JSON else text) == body
