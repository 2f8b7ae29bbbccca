"""The client, synchronous and asynchronous, against our server and the official Node server: one suite for all four."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import pytest

import headwater
from headwater.client import (
    BEGINNING,
    NOW,
    AsyncBootstrap,
    AsyncBucket,
    AsyncClient,
    AsyncPart,
    AsyncProducer,
    AsyncReader,
    AsyncStream,
    Bootstrap,
    Bucket,
    Client,
    ConflictError,
    InvalidRequestError,
    Part,
    Producer,
    ProducerFencedError,
    ProducerGapError,
    ProducerStamp,
    Reader,
    Stream,
    StreamClosedError,
    StreamNotFoundError,
    digest_of,
)
from tests.client.faces import client_of
from tests.serving import Server, serve

OURS = "headwater"
NODE = "node"


@pytest.fixture(scope="module")
def ours() -> Iterator[Server]:
    """A server that ends live responses early, so that readers must reconnect, and that responds in small chunks."""
    with serve(
        DS_SERVER__LONG_POLL_TIMEOUT_SECS="1",
        DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="1",
        DS_LIMITS__MAX_CHUNK_BYTES="4000",
        DS_REGISTRY__ENABLED="true",
    ) as running:
        yield running


@pytest.fixture(scope="module", params=[OURS, NODE])
def client(request: pytest.FixtureRequest, face: str) -> Iterator[Any]:
    """Each API with each server."""
    url = request.getfixturevalue("ours").url if request.param == OURS else request.getfixturevalue("node")
    with client_of(face, url) as client:
        yield client


@pytest.fixture(scope="module")
def our_client(ours: Server, face: str) -> Iterator[Any]:
    with client_of(face, ours.url) as client:
        yield client


@pytest.fixture
def stream(client: Any, stream_name: Callable[[], str]) -> Any:
    return client.stream(stream_name())


def test_create_append_read_head_delete(stream: Any) -> None:
    assert stream.create(ttl_s=3600).created
    assert not stream.create(ttl_s=3600).created
    first = stream.append({"n": 1}).next_offset
    stream.append_many([2, [3, 4], "five", None])
    stream.append([6])
    assert list(stream.read()) == [{"n": 1}, 2, [3, 4], "five", None, [6]]
    assert list(stream.read(first)) == [2, [3, 4], "five", None, [6]]
    info = stream.head()
    assert (info.content_type, info.ttl_s, info.closed) == ("application/json", 3600, False)
    assert list(stream.read(info.next_offset)) == []
    stream.delete()
    with pytest.raises(StreamNotFoundError):
        stream.head()
    with pytest.raises(StreamNotFoundError):
        list(stream.read())
    stream.delete(missing_ok=True)


def test_json_text_is_appended_byte_for_byte(our_client: Any, stream_name: Callable[[], str]) -> None:
    stream = our_client.stream(stream_name())
    stream.create()
    stream.append(b'{"id":9007199254740993,"b":1.0}')
    stream.append(b"[1]")
    messages = [message for batch in stream.read().batches() for message in batch.messages]
    assert messages == [b'{"id":9007199254740993,"b":1.0}', b"[1]"]


def test_text_and_bytes(client: Any, stream_name: Callable[[], str]) -> None:
    text = client.stream(stream_name())
    text.create("text/plain; charset=utf-8")
    encoded = "né\r\n".encode()
    for piece in (encoded[:2], encoded[2:], "ext"):
        text.append(piece)
    assert "".join(text.read()) == "né\r\next"
    data = client.stream(stream_name())
    data.create("application/octet-stream")
    data.append(bytes(range(256)))
    data.append_many([b"a", b"b"])
    assert b"".join(data.read()) == bytes(range(256)) + b"ab"
    with pytest.raises(InvalidRequestError, match="must be"):
        data.append({"a": 1})


def test_invalid_message_is_an_error_before_it_is_sent(stream: Any) -> None:
    stream.create()
    with pytest.raises(InvalidRequestError, match="JSON"):
        stream.append(object())
    with pytest.raises(InvalidRequestError, match="no messages"):
        stream.append_many([])
    with pytest.raises(InvalidRequestError, match="forbidden"):
        stream.append(1, headers={"X": "a\r\nInjected: yes"})
    with pytest.raises(InvalidRequestError, match="not both"):
        stream.create(ttl_s=1, expires_at=datetime.now(UTC))
    assert list(stream.read()) == []


@pytest.mark.parametrize("live", ["auto", "sse", "long-poll"])
@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "application/octet-stream"])
def test_follow_delivers_existing_then_new_messages_then_the_close(stream: Any, live: str, content_type: str) -> None:
    stream.create(content_type)
    sent: list[Any] = (
        [{"n": n} for n in range(60)] if content_type == "application/json" else [f"{n};" for n in range(60)]
    )
    if content_type == "application/octet-stream":
        sent = [text.encode() for text in sent]
    stream.append_many(sent[:30])

    def append_the_rest() -> None:
        for message in sent[30:]:
            stream.append(message)
        stream.close()

    reader = stream.follow(live=live)
    received = [next(reader)]
    writer = threading.Thread(target=append_the_rest)
    writer.start()
    received += list(reader)
    writer.join()
    if content_type == "application/json":
        assert received == sent
    else:
        assert sent[0][:0].join(received) == sent[0][:0].join(sent)
    assert reader.closed
    assert reader.up_to_date
    assert reader.offset == stream.head().next_offset


def test_a_reader_resumes_at_its_offset(stream: Any) -> None:
    stream.create()
    stream.append_many([1, 2])
    reader = stream.follow()
    assert [next(reader), next(reader)] == [1, 2]
    assert reader.up_to_date
    offset = reader.offset
    reader.stop()
    stream.append_many([3, 4])
    with stream.follow(offset) as resumed:
        assert list(islice(resumed, 2)) == [3, 4]


def test_follow_from_now_skips_existing_messages(stream: Any) -> None:
    stream.create()
    stream.append("old")
    with stream.follow(NOW) as reader:
        batches = reader.batches()
        first = next(iter(batches))
        assert (first.values, first.up_to_date) == ([], True)
        stream.append("new")
        assert next(batch.values for batch in batches if batch.values) == ["new"]


def test_a_closed_stream_refuses_appends_and_ends_readers(stream: Any) -> None:
    stream.create()
    stream.append("last", close=True)
    stream.close()
    with pytest.raises(StreamClosedError):
        stream.append("late")
    reader = stream.follow()
    assert list(reader) == ["last"]
    assert reader.closed


def test_last_returns_the_end_of_the_stream(stream: Any) -> None:
    stream.create()
    assert stream.last() == []
    stream.append_many([{"n": n, "text": "x" * (n % 50)} for n in range(1500)])
    assert [value["n"] for value in stream.last(3)] == [1497, 1498, 1499]
    assert stream.last() == [{"n": 1499, "text": "x" * 49}]
    assert len(stream.last(5000)) == 1500


def test_a_fork_starts_with_the_data_of_its_source(client: Any, stream: Any, stream_name: Callable[[], str]) -> None:
    stream.create()
    middle = stream.append(1).next_offset
    stream.append(2)
    whole = stream.fork(stream_name())
    part = stream.fork(stream_name(), offset=middle)
    part.append("other")
    assert list(whole.read()) == [1, 2]
    assert list(part.read()) == [1, "other"]


def test_encoded_bodies_are_sent_and_read_unchanged(client: Any, stream: Any, stream_name: Callable[[], str]) -> None:
    stream.create()
    middle = stream.append_body(b"[1,2]").next_offset
    stream.append_body(b"3")
    chunk = stream.read_chunk(middle)
    assert (chunk.body, chunk.next_offset, chunk.up_to_date) == (b"[3]", stream.head().next_offset, True)
    copy = client.stream(stream_name())
    assert copy.fork_from(stream, offset=middle).created
    assert copy.read_chunk().body == b"[1,2]"


def test_expiry_and_creation_with_content(stream: Any) -> None:
    until = datetime.now(UTC) + timedelta(hours=1)
    assert stream.create(expires_at=until, body=b'["first"]', closed=True).created
    info = stream.head()
    assert info.closed
    assert info.expires_at is not None
    assert list(stream.follow()) == ["first"]


def test_producer_headers_make_an_append_idempotent(stream: Any) -> None:
    stream.create()
    stamp = ProducerStamp("loader", epoch=1, seq=0)
    assert not stream.append("once", producer=stamp).duplicate
    again = stream.append("once", producer=stamp)
    assert again.duplicate
    assert again.digest in {None, digest_of(b'"once"')}
    with pytest.raises(ProducerGapError) as gap:
        stream.append("gap", producer=ProducerStamp("loader", 1, 5))
    assert gap.value.expected_seq == 1
    with pytest.raises(ProducerFencedError) as fenced:
        stream.append("old", producer=ProducerStamp("loader", 0, 1))
    assert fenced.value.current_epoch == 1
    assert list(stream.read()) == ["once"]


def test_stream_seq_orders_writers(stream: Any) -> None:
    stream.create()
    stream.append(1, seq="001")
    with pytest.raises(ConflictError):
        stream.append(2, seq="001")
    assert list(stream.read()) == [1]


def test_a_stream_of_another_type_is_a_conflict(stream: Any) -> None:
    stream.create()
    with pytest.raises(ConflictError):
        stream.create("text/plain")


# -- our extensions ----------------------------------------------------------------------------------------------------


def test_buckets_list_their_streams(our_client: Any, face: str) -> None:
    bucket = our_client.bucket(f"faces-{face}")
    assert bucket.create()
    assert not bucket.create(exist_ok=True)
    with pytest.raises(ConflictError):
        bucket.create()
    for name in ("b", "a/é"[0], "user 1"):
        bucket.stream(name).create()
    assert [entry.name for entry in bucket.streams()] == ["a", "b", "user 1"]
    assert [entry.name for entry in bucket.streams("user")] == ["user 1"]
    assert f"faces-{face}" in [entry.bucket_id for entry in our_client.buckets()]
    with pytest.raises(ConflictError):
        bucket.delete()
    for entry in list(bucket.streams()):
        bucket.stream(entry.name).delete()
    bucket.delete()


def test_the_registry_lists_streams(our_client: Any, stream_name: Callable[[], str]) -> None:
    prefix = stream_name()
    for name in ("b", "a", "gone"):
        our_client.stream(f"{prefix}/{name}").create()
    our_client.stream(f"{prefix}/gone").delete()
    assert [entry.name for entry in our_client.registered_streams(prefix)] == [f"{prefix}/a", f"{prefix}/b"]
    listed = our_client.streams(prefix)
    assert [entry.name for entry in listed] == [f"{prefix}/a", f"{prefix}/b"]
    assert listed[0].next_offset == our_client.stream(f"{prefix}/a").head().next_offset


def test_a_server_without_a_listing_is_an_error(node: str, face: str) -> None:
    with client_of(face, node) as client, pytest.raises(StreamNotFoundError):
        client.streams()


def test_many_streams_are_followed_as_one(our_client: Any, stream_name: Callable[[], str]) -> None:
    """Existing, later created, and recreated streams: each message once, in order."""
    prefix = stream_name()
    streams = {name: our_client.stream(f"{prefix}/{name}") for name in ("a", "b", "later", "é%2F 1")}
    for name in ("a", "b", "é%2F 1"):
        streams[name].create()
        streams[name].append([name, 0])
    following = our_client.follow_many(f"{prefix}/")
    seen: dict[str, list[Any]] = {}

    def until(name: str, last: Any) -> None:
        for found in following:
            seen.setdefault(found.name.removeprefix(f"{prefix}/"), []).extend(found.batch.values)
            if seen.get(name, [None])[-1] == last:
                return

    until("é%2F 1", ["é%2F 1", 0])
    streams["later"].create()
    streams["later"].append(["later", 0])
    until("later", ["later", 0])
    streams["a"].append_many([["a", n] for n in range(1, 200)])
    until("a", ["a", 199])
    streams["b"].delete()
    streams["b"].create()
    streams["b"].append(["b", "again"])
    until("b", ["b", "again"])
    assert seen == {
        "a": [["a", n] for n in range(200)],
        "b": [["b", 0], ["b", "again"]],
        "é%2F 1": [["é%2F 1", 0]],
        "later": [["later", 0]],
    }
    offset = streams["a"].head().next_offset
    streams["a"].append(["a", "last"])
    resumed = our_client.follow_many(f"{prefix}/a", offsets={f"{prefix}/a": offset})
    assert next(resumed).batch.values == [["a", "last"]]


def test_named_streams_are_followed_until_all_are_closed(our_client: Any, stream_name: Callable[[], str]) -> None:
    prefix = stream_name()
    one, two, later = (our_client.stream(f"{prefix}/{name}") for name in ("1", "2", "later"))
    for stream in (one, two):
        stream.create()
        stream.append("old")
    names = {f"{prefix}/1": "-1", f"{prefix}/2": two.head().next_offset, f"{prefix}/later": "-1"}
    named = our_client.follow_many(None, offsets=names)
    assert next(named).batch.values == ["old"]
    later.create()
    later.append("created later")
    assert next(named).batch.values == ["created later"]
    two.append("last")
    for stream in (one, two, later):
        stream.close()
    assert [found.batch.values for found in named] == [["last"]]


def test_many_streams_are_followed_from_now_on(our_client: Any, stream_name: Callable[[], str]) -> None:
    prefix = stream_name()
    stream = our_client.stream(f"{prefix}/a")
    stream.create()
    stream.append("old")
    stopped = threading.Event()

    def write() -> None:
        while not stopped.wait(0.02):
            stream.append("new")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for found in (
            next(our_client.follow_many(f"{prefix}/", start="now")),
            next(our_client.follow_many(None, offsets={f"{prefix}/a": "now"})),
        ):
            assert set(found.batch.values) == {"new"}
    finally:
        stopped.set()
        writer.join()
    with pytest.raises(InvalidRequestError, match="start is"):
        next(our_client.follow_many("x/", start="0_0"))


def test_snapshots_and_bootstrap(our_client: Any, face: str) -> None:
    bucket = our_client.bucket(f"snap-{face}")
    bucket.create()
    stream = bucket.stream("total")
    stream.create()
    middle = stream.append_many([1, 2, 3]).next_offset
    stream.publish_snapshot(middle, b"6", "text/plain")
    stream.append(10)
    stream.append(20)
    found = stream.snapshot()
    assert (found.offset, found.content_type, found.body) == (middle, "text/plain", b"6")
    assert stream.snapshot(middle) == found
    with stream.bootstrap() as bootstrap:
        assert bootstrap.info.snapshot_offset == middle
        assert [part.read() for part in bootstrap.parts] == [b"6", b"10", b"20"]
    stream.publish_snapshot(stream.head().next_offset, (piece for piece in (b"3", b"6")), "text/plain")
    assert stream.snapshot().body == b"36"


def test_bounded_reads_splits_and_frames(our_client: Any, stream_name: Callable[[], str]) -> None:
    stream = our_client.stream(stream_name())
    stream.create()
    middle = stream.append_many(["one", "two"]).next_offset
    end = stream.append("three").next_offset
    assert stream.read_chunk(BEGINNING, until=middle).body == b'["one","two"]'
    frames = stream.read_frames(BEGINNING, end)
    assert frames.content_type == "application/json"
    assert frames.body.endswith(b'"one","two","three",')
    ranges = stream.splits(BEGINNING, end, 3)
    assert [(part.start_position, part.end_position) for part in ranges] == [(0, 1), (1, 2), (2, 3)]


def test_reading_since_a_time(our_client: Any, stream_name: Callable[[], str]) -> None:
    stream = our_client.stream(stream_name())
    stream.create()
    stream.append("first")
    (first,) = stream.timed_messages()
    assert first.data == b'"first"'
    assert abs(first.at - datetime.now(UTC)) < timedelta(minutes=5)
    assert list(stream.read(since=first.at)) == ["first"]
    assert list(stream.read(since=datetime.now(UTC) + timedelta(days=1))) == []
    assert stream.offset_at(0) == stream.offset_at("1970-01-01T00:00:00Z")
    assert stream.offset_at(datetime.now(UTC) + timedelta(days=1)) == stream.head().next_offset
    stream.close()
    assert list(stream.follow(since=0)) == ["first"]
    with pytest.raises(InvalidRequestError, match="time zone"):
        stream.offset_at(datetime(2026, 1, 1))  # noqa: DTZ001


# -- both APIs have the same names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sync", "asynchronous"),
    [
        (Client, AsyncClient),
        (Stream, AsyncStream),
        (Bucket, AsyncBucket),
        (Reader, AsyncReader),
        (Producer, AsyncProducer),
        (Bootstrap, AsyncBootstrap),
        (Part, AsyncPart),
    ],
)
def test_both_apis_have_the_same_names_parameters_and_defaults(sync: type, asynchronous: type) -> None:
    def surface(kind: type) -> dict[str, list[tuple[str, object, object]] | None]:
        """Methods with their parameters, and properties."""
        found: dict[str, list[tuple[str, object, object]] | None] = {}
        for name in dir(kind):
            member = getattr(kind, name)
            if inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
                parameters = inspect.signature(member).parameters.values()
                found[name] = [(each.name, each.kind, each.default) for each in parameters]
            elif isinstance(member, property):
                found[name] = None
        return found

    assert surface(sync) == surface(asynchronous)


def test_every_class_of_one_api_is_in_the_other() -> None:
    exported = {name: getattr(headwater.client, name) for name in headwater.client.__all__}
    blocking = {
        name
        for name, value in exported.items()
        if getattr(value, "__module__", "") in {"headwater.client.blocking", "headwater.client.sync_producer"}
    }
    assert {f"Async{name}" for name in blocking} == {name for name in exported if name.startswith("Async")}
    top = set(headwater.__all__)
    assert {f"Async{name}" for name in blocking & top} == {name for name in top if name.startswith("Async")}
