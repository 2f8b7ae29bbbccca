"""One event stream over many streams: its events, resuming, refusals, and fairness between streams."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from headwater.http.follow import NAMES_MAX
from tests.http.bucketed import Bucket
from tests.http.protocol import Stream, assert_problem
from tests.http.sse_reader import SseReader
from tests.serving import Server, serve

FOLLOW = "/v1/stream/__ds/follow"


class Following:
    """The events of one id."""

    def __init__(self, server: Server, session_id: str, headers: dict[str, str] | None = None) -> None:
        self.reader = SseReader(server, f"{FOLLOW}/{session_id}", headers=headers)

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *ended: object) -> None:
        self.reader.connection.socket.close()

    def next(self, kind: str = "data") -> dict[str, Any]:
        event = self.reader.next()
        assert event.kind == kind, event
        found: dict[str, Any] = json.loads(event.data)
        return found


def begin(client: httpx.Client, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return client.post(FOLLOW, json=body, headers=headers)


def id_of(client: httpx.Client, **body: Any) -> str:
    answer = begin(client, **body)
    assert answer.status_code == 201, answer.text
    found: str = answer.json()["id"]
    assert answer.headers["location"].endswith(f"{FOLLOW}/{found}")
    return found


@pytest.fixture
def prefix(stream_name: Callable[[], str]) -> str:
    return f"{stream_name()}/"


@pytest.fixture
def make(client: httpx.Client, prefix: str) -> Callable[..., Stream]:
    def made(name: str, content: bytes | str = b"", content_type: str = "application/json") -> Stream:
        return Stream(client, prefix + name, content_type).create(content)

    return made


def test_every_event_has_its_stream_and_next_offset(
    server: Server, client: httpx.Client, prefix: str, make: Callable[..., Stream]
) -> None:
    first = make("a", '[{"n":1},{"n":2}]')
    make("b")
    with Following(server, id_of(client, prefix=prefix)) as following:
        assert following.next() == {
            "stream": f"{prefix}a",
            "contentType": "application/json",
            "streamNextOffset": first.tail(),
            "upToDate": True,
            "messages": [{"n": 1}, {"n": 2}],
        }
        assert following.next("control") == {"upToDate": True}
        offset = first.append('{"n":3}')
        event = following.next()
        assert (event["messages"], event["streamNextOffset"]) == ([{"n": 3}], offset)
        later = make("c", '["later"]')
        assert following.next()["stream"] == later.name
        later.close('["end"]')
        event = following.next()
        assert (event["messages"], event["streamClosed"]) == (["end"], True)
        assert first.delete().status_code == 204
        problem = following.next("problem")
        assert (problem["stream"], problem["status"], problem["code"]) == (first.name, 404, "stream_not_found")
        make("a", "[5]")
        assert following.next()["messages"] == [5]


@pytest.mark.one_process
def test_streams_are_named_with_their_offsets(
    server: Server, client: httpx.Client, make: Callable[..., Stream], prefix: str
) -> None:
    """One stream from an offset, one from the end, and one that does not exist yet."""
    one, two = make("1", "[1]"), make("2", "[1]")
    middle = one.tail()
    one.append("[2]")
    names = {one.name: middle, two.name: "now", f"{prefix}3": "-1"}
    with Following(server, id_of(client, streams=names)) as following:
        # The streams are in any order.
        events = {(event := following.reader.next()).kind: json.loads(event.data) for _ in range(2)}
        assert events["data"]["messages"] == [2]
        assert events["problem"]["stream"] == f"{prefix}3"
        following.next("control")
        make("other", "[0]")
        two.append("[3]")
        assert following.next()["messages"] == [3]
        make("3", "[4]")
        assert following.next()["messages"] == [4]


def test_text_and_bytes_are_exact(
    server: Server, client: httpx.Client, make: Callable[..., Stream], prefix: str
) -> None:
    make("text", "line\r\n ü", "text/plain")
    make("torn", b"\xff", "text/plain").append(b"plain")
    make("bytes", b"\0\r\n", "application/octet-stream")
    with Following(server, id_of(client, prefix=prefix)) as following:
        found = {event["stream"].removeprefix(prefix): event for event in (following.next() for _ in range(3))}
    assert found["text"]["messages"] == ["line\r\n ü"]
    assert found["bytes"]["encoding"] == found["torn"]["encoding"] == "base64"
    assert [base64.b64decode(text) for text in found["torn"]["messages"]] == [b"\xff", b"plain"]
    assert [base64.b64decode(text) for text in found["bytes"]["messages"]] == [b"\0\r\n"]


def test_large_message_is_announced_and_read_from_its_stream(
    server: Server, client: httpx.Client, make: Callable[..., Stream], prefix: str
) -> None:
    stream = make("large", json.dumps(["x" * 300_000]))
    stream.append("[1]")
    with Following(server, id_of(client, prefix=prefix)) as following:
        event = following.next()
        assert "messages" not in event
        found = stream.get(offset=event["large"]["offset"], until=event["streamNextOffset"])
        assert found.json() == ["x" * 300_000]
        assert following.next()["messages"] == [1]


def test_a_stream_of_a_bucket_is_named_by_its_path(server: Server, client: httpx.Client, bucket: Bucket) -> None:
    stream = bucket.stream("s", "application/json").create("[1]")
    with Following(server, id_of(client, streams={stream.path: "-1"})) as following:
        assert following.next()["stream"] == stream.path


def test_a_reconnect_continues_after_the_last_event(
    server: Server, client: httpx.Client, make: Callable[..., Stream], prefix: str
) -> None:
    """As `EventSource` does: the same URL, with the id of the last event received."""
    stream = make("a", "[1]")
    session = id_of(client, prefix=prefix)
    with Following(server, session) as following:
        following.next()
        following.next("control")
        stream.append("[2]")
        following.next()
        stream.append("[3]")
        following.next()
    with Following(server, session, {"Last-Event-ID": "2"}) as again:
        assert again.next()["messages"] == [3]
        again.next("control")
        stream.append("[4]")
        assert again.next()["messages"] == [4]
        with Following(server, session, {"Last-Event-ID": "3"}) as replacing:
            assert replacing.next()["messages"] == [4]
            assert list(again.reader) == [], "the replaced connection ends"
    assert_problem(client.get(f"{FOLLOW}/{session}", headers={"Last-Event-ID": "2"}), 404, "follow_not_found")
    assert_problem(client.get(f"{FOLLOW}/{session}", headers={"Last-Event-ID": "99"}), 404, "follow_not_found")
    assert_problem(client.get(f"{FOLLOW}/{session}", headers={"Last-Event-ID": "x"}), 400, "bad_request")


@pytest.mark.parametrize("by", ["prefix", "name"])
def test_reconnect_misses_nothing_of_streams_followed_from_now(
    server: Server, client: httpx.Client, make: Callable[..., Stream], prefix: str, by: str
) -> None:
    """`now` is the moment of the first connection, also for streams of which no event was sent yet."""
    stream = make("a", "[1]")
    wanted = {"prefix": prefix, "start": "now"} if by == "prefix" else {"streams": {stream.name: "now"}}
    session = id_of(client, **wanted)
    with Following(server, session) as following:
        following.next("control")
    stream.append("[2]")
    with Following(server, session) as following:
        assert following.next()["messages"] == [2]


def test_a_stream_that_is_created_between_two_connections_is_read_from_its_beginning(
    server: Server, client: httpx.Client, make: Callable[..., Stream], prefix: str
) -> None:
    session = id_of(client, prefix=prefix, start="now")
    with Following(server, session) as following:
        following.next("control")
    make("later", "[1]")
    with Following(server, session) as following:
        assert following.next()["messages"] == [1]


def test_an_unused_id_expires(moving_server: Server, moving_client: httpx.Client) -> None:
    session = id_of(moving_client, prefix="none/")
    moving_server.pass_time(61)
    assert_problem(moving_client.get(f"{FOLLOW}/{session}"), 404, "follow_not_found")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"streams": []},
        {"streams": {"a": 1}},
        {"streams": {"": "-1"}},
        {"streams": {"a/../b": "-1"}},
        {"streams": {"__ds/x": "-1"}},
        {"prefix": 1},
        {"prefix": "a", "start": "5"},
    ],
)
def test_a_malformed_request_is_400(client: httpx.Client, body: dict[str, Any]) -> None:
    assert begin(client, **body).status_code == 400


def test_a_session_keeps_no_long_texts(client: httpx.Client) -> None:
    """There may be a thousand sessions, and each keeps its prefix and its offsets."""
    assert_problem(begin(client, prefix="p" * 1025), 400, "bad_request")
    assert_problem(begin(client, streams={"a": "0" * 51}), 400, "bad_request")
    assert begin(client, prefix="p" * 1024, streams={"a": "0" * 50}).status_code == 201


def test_too_many_names_in_one_request_are_413(client: httpx.Client) -> None:
    """They are checked at once, on the event loop."""
    refused = begin(client, streams={f"n{number}": "-1" for number in range(NAMES_MAX + 1)})
    assert_problem(refused, 413, "too_many_followed")


@pytest.mark.parametrize("last", ["x", "-1", "1" * 19, "9" * 5000])
def test_last_event_id_that_the_server_never_sent_is_400(client: httpx.Client, prefix: str, last: str) -> None:
    found = id_of(client, prefix=prefix)
    assert_problem(client.get(f"{FOLLOW}/{found}", headers={"Last-Event-ID": last}), 400, "bad_request")


def test_stream_recreated_while_disconnected_is_read_from_its_beginning(
    server: Server, client: httpx.Client, make: Callable[..., Stream], prefix: str
) -> None:
    gone = make("gone", "[1]")
    found = id_of(client, prefix=prefix)
    with Following(server, found) as following:
        assert following.next()["messages"] == [1]
        assert following.next("control") == {"upToDate": True}
        gone.delete()
        assert following.next("problem")["status"] == 404
    make("gone", "[2]")
    with Following(server, found, {"Last-Event-ID": "2"}) as following:
        assert following.next()["messages"] == [2]


@pytest.mark.one_process
def test_offset_of_another_stream_is_reported_for_that_stream(
    server: Server, client: httpx.Client, make: Callable[..., Stream]
) -> None:
    good, bad, old = make("good", "[1]"), make("bad", "[1]"), make("old", "[1]")
    stale = old.tail()
    old.delete()
    make("old", "[2]")
    names = {bad.name: "no-offset", old.name: stale, good.name: "-1"}
    with Following(server, id_of(client, streams=names)) as following:
        # The streams are in any order.
        events = [following.reader.next() for _ in range(3)]
        problems = [json.loads(event.data) for event in events if event.kind == "problem"]
        assert {(each["stream"], each["status"], each["code"]) for each in problems} == {
            (bad.name, 400, "invalid_offset"),
            (old.name, 410, "stream_recreated"),
        }
        assert [json.loads(event.data)["messages"] for event in events if event.kind == "data"] == [[1]]


def test_ids_and_streams_are_limited() -> None:
    with (
        serve(DS_LIMITS__MAX_FOLLOWS="2", DS_LIMITS__MAX_FOLLOWED_STREAMS="3") as server,
        httpx.Client(base_url=server.url) as http,
    ):
        for number in range(3):
            Stream(http, f"a{number}", "application/json").create("[1]")
        session = id_of(http, prefix="a")
        with Following(server, session) as following:
            for _ in range(3):
                following.next()
            following.next("control")
            Stream(http, "a3", "application/json").create("[1]")
            assert following.next("problem")["code"] == "too_many_followed"
            assert list(following.reader) == []
        with Following(server, session) as following:
            events = list(following.reader)
            assert json.loads(events[-1].data)["code"] == "too_many_followed", "also if all of them exist at the start"
            assert [event.kind for event in events].count("problem") == 1
        with Following(server, id_of(http, streams={"a1": "-1"})) as following:
            assert following.next()["messages"] == [1], "the streams of the first follower no longer count"
        refused = begin(http, prefix="c")
        assert_problem(refused, 503, "too_many_follows")
        assert refused.headers["retry-after"] == "1"


def test_busy_streams_do_not_starve_the_others(
    server: Server, client: httpx.Client, make: Callable[..., Stream], prefix: str
) -> None:
    """The first stream by name has much more data than one turn sends; the other one does not wait for it."""
    make("a", json.dumps(["x" * 1000] * 3000))
    make("b", "[1]")
    names = []
    with Following(server, id_of(client, prefix=prefix)) as following:
        while "b" not in names:
            names.append(following.next()["stream"].removeprefix(prefix))
    assert len(names) < 12, "of 47 events of the first stream"


def test_proxy_headers_restrict_the_streams_that_can_be_followed(
    server: Server, client: httpx.Client, make: Callable[..., Stream], prefix: str
) -> None:
    """Headers that only the proxy may set select a namespace and exclude reserved streams."""
    namespace = prefix.removesuffix("/")
    headers = {"x-headwater-namespace": namespace, "x-headwater-reserved": "deny", "x-jwt-sub": "ada"}
    stream = make("a", "[1]")
    for refused in (
        {"streams": {"other": "-1"}},
        {"streams": {namespace: "-1"}},
        {"streams": {f"{namespace}2/a": "-1"}},
        {"streams": {"/ds/bucket/a": "-1"}},
        {"prefix": ""},
        {"prefix": namespace},
        {"prefix": f"{namespace}2"},
        {"prefix": "__"},
    ):
        assert_problem(begin(client, headers, **refused), 403, "outside_namespace")
    for query in ("", namespace, f"{namespace}x"):
        for live in ({}, {"live": "long-poll"}):
            answer = client.get("/v1/stream/__ds/streams", params={"prefix": query, **live}, headers=headers)
            assert_problem(answer, 403, "outside_namespace")
    listed = client.get("/v1/stream/__ds/streams", params={"prefix": prefix}, headers=headers).json()
    assert [each["name"] for each in listed["streams"]] == [stream.name]
    answer = begin(client, headers, prefix=prefix)
    assert answer.status_code == 201
    for other in ({}, {**headers, "x-jwt-sub": "bob"}, {**headers, "x-headwater-namespace": "x"}):
        assert_problem(client.get(f"{FOLLOW}/{answer.json()['id']}", headers=other), 404, "follow_not_found")
    with Following(server, answer.json()["id"], headers) as following:
        assert following.next()["messages"] == [1]


def test_without_a_namespace_only_an_administrator_searches_by_prefix(client: httpx.Client, stream: Stream) -> None:
    headers = {"x-headwater-reserved": "deny"}
    assert_problem(client.get("/v1/stream/__ds/streams", headers=headers), 403, "outside_namespace")
    assert_problem(begin(client, headers, prefix="a"), 403, "outside_namespace")
    assert_problem(begin(client, headers, streams={"__registry__": "-1"}), 403, "outside_namespace")
    assert begin(client, headers, streams={stream.name: "-1"}).status_code == 201
