"""The compiled path of plain appends has the same effects and responses as the usual way."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
from bench.calls import ServerHarness, encode
from hypothesis import given
from hypothesis import strategies as st

from headwater.config import LimitsSettings, Settings, StorageSettings
from headwater.core import native
from headwater.engine import creation
from headwater.engine.open_storage import open_store
from headwater.engine.stream import LiveStream
from headwater.http import compiled_appends, server
from headwater.http.connection import Connection
from headwater.storage.memory import MemoryStorage
from headwater.storage.tail import BLOCK_BYTES
from tests.engine.seams import JournalStorage, ManualClock, WatchedStorage
from tests.http_units.transport import Transport

pytestmark = pytest.mark.skipif(native.BUILD == "pure", reason="this environment was built without a compiler")

NAMES = ("a", "b", "j")
TYPES = {"a": "text/plain", "b": "text/plain", "j": "application/json"}
CONNECTIONS = 2
MAX_STREAM_BYTES = 3_000
CLOSE = "Stream-Closed: true\r\n"
AT_CONNECTION = frozenset(("connections", "requests"))
OBJECTS = frozenset(("name", "type", "frame", "followers", "lineage", "fork", "retention"))
"""Slots that are compared by other means, or differ between two servers."""


class World(ServerHarness):
    """A server without sockets, with or without the compiled path."""

    current: ClassVar[World]
    """The one that processes a request."""

    def __init__(self, *, compiled: bool, durable: bool, **limits: int) -> None:
        loop = asyncio.get_running_loop()
        storage = StorageSettings(mode="memory", commit="inline")
        settings = Settings(storage=storage, limits=LimitsSettings(**limits))
        store = open_store(storage)
        self.journal: list[tuple[bytes, tuple[int, ...]]] = []
        self.storage = JournalStorage(self.journal) if durable else MemoryStorage()
        self.disk = WatchedStorage(self.storage)
        engine = server.build_engine(settings, store._replace(storage=self.disk if durable else self.storage), loop)
        super().__init__(engine, server.build_context(settings, engine, None, loop, 100))
        engine.start()
        self.context.common_headers.set_date(0.0)
        self.ids = itertools.count(1)
        self.taken = 0
        path = self.context.append_known
        assert path is not None
        self._path = path
        self.context.append_known = self._count if compiled else None
        self.clients = [self._client() for _ in range(CONNECTIONS)]

    def _client(self) -> tuple[Connection, Transport]:
        connection, transport = Connection(self.context, self.router), Transport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        return connection, transport

    def _count(self, connection: Connection, data: bytes) -> bool:
        is_taken = self._path(connection, data)
        self.taken += is_taken
        return is_taken

    def close(self) -> None:
        self.tails = dict(self.storage.tails)
        self.engine.stop()

    def state(self) -> dict[str, object]:
        """Everything that an append may change."""
        quota, metrics = self.engine.quota, self.engine.metrics
        streams = {
            name: {slot: getattr(stream, slot) for slot in slots_of(LiveStream) if slot not in OBJECTS}
            | {"is_followed": bool(stream.followers), "data": self.data(stream.id)}
            for name, stream in self.engine.catalog.by_name.items()
        }
        return {
            "streams": streams,
            "journal": list(self.journal),
            "stored": self.storage.usage(),
            "quota": (quota.content_bytes, quota.metadata_bytes),
            "metrics": (metrics.appends, metrics.append_bytes, metrics.appended_messages, metrics.requests),
            "seconds": {name: sum(each.counts) for name, each in metrics.request_seconds.items()},
            "connections": [
                (one._writing, one._operation, one._request_id, one._is_last, one._input.reasons)
                for one, _ in self.clients
            ],
            "requests": [getattr(one._request, "target", None) for one, _ in self.clients],
            "sent": [(b"".join(one.written), one.is_read, one.is_closed) for _, one in self.clients],
        }

    def data(self, stream_id: int) -> tuple[object, ...]:
        tail = self.storage.tails.get(stream_id)
        if tail is None:
            return ()
        content = b"".join(tail.read(tail.byte_position, tail.end_position))
        return tail.message_index, tail.byte_position, list(tail.ends), list(tail.times), content


def slots_of(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        yield from getattr(base, "__slots__", ())


Step = Callable[[World], None]


def append(client: int, name: str, body: bytes, cut: int | None = None, times: int = 1, as_type: str = "") -> Step:
    data = encode("POST", f"/v1/stream/{name}", body, as_type or TYPES[name]) * times

    def run(world: World) -> None:
        connection, _ = world.clients[client]
        for piece in (data,) if cut is None else (data[:cut], data[cut:]):
            if piece:
                connection.data_received(piece)

    return run


def send(client: int, method: str, target: str, content_type: str = "text/plain", field: str = "") -> Step:
    data = encode(method, target, b"", content_type).replace(b"\r\n", f"\r\n{field}".encode(), 1)

    def run(world: World) -> None:
        world.clients[client][0].data_received(data)

    return run


def unread(client: int) -> Step:
    def run(world: World) -> None:
        world.clients[client][0].pause_writing()

    return run


def read_again(client: int) -> Step:
    def run(world: World) -> None:
        world.clients[client][0].resume_writing()

    return run


def lose(client: int) -> Step:
    """The client disconnects, and another one connects."""

    def run(world: World) -> None:
        world.clients[client][0].connection_lost(None)
        world.clients[client] = world._client()

    return run


def drain(client: int) -> Step:
    def run(world: World) -> None:
        world.clients[client][0].drain()

    return run


def fail_writes() -> Step:
    def run(world: World) -> None:
        world.disk.fails_in = 0

    return run


def publish_all(value: bool) -> Step:
    def run(world: World) -> None:
        world.engine._committer.publishes_all = value

    return run


def observe(value: bool) -> Step:
    def run(world: World) -> None:
        world.context.request_log.is_on = value

    return run


def move_clock(milliseconds: int) -> Step:
    def run(world: World) -> None:
        clock = world.engine.plain_appends._clock
        assert isinstance(clock, ManualClock)
        clock.at_ms += milliseconds

    return run


clients = st.integers(0, CONNECTIONS - 1)
names = st.sampled_from(NAMES)
bodies = st.sampled_from(
    [b"x", b"y" * 100, b"[1,2,3]", b'{"a":"b"}', b"[", b"[]", b"", b"\xff", b'"\xff"', b"z" * 1500, b"1" * 5000]
)
appends = st.builds(append, clients, names, bodies, st.none() | st.integers(1, 150), st.integers(1, 3))
steps = st.one_of(
    appends,
    appends,
    appends,
    st.builds(append, clients, names, bodies, as_type=st.sampled_from(["text/plain", "application/json", "a/b"])),
    st.builds(send, clients, st.just("DELETE"), names.map("/v1/stream/{}".format)),
    names.flatmap(lambda name: clients.map(lambda client: send(client, "PUT", f"/v1/stream/{name}", TYPES[name]))),
    st.builds(send, clients, st.just("POST"), names.map("/v1/stream/{}".format), field=st.just(CLOSE)),
    st.builds(send, clients, st.just("GET"), names.map("/v1/stream/{}?offset=-1".format)),
    st.builds(send, clients, st.just("GET"), names.map("/v1/stream/{}?offset=-1&live=sse".format)),
    st.builds(lose, clients),
    st.builds(drain, clients),
    st.builds(unread, clients),
    st.builds(read_again, clients),
    st.builds(publish_all, st.booleans()),
    st.builds(observe, st.booleans()),
    st.builds(move_clock, st.integers(-5, 5)),
)  # fmt: skip


async def same(sequence: Sequence[list[Step]], *, durable: bool, **limits: int) -> World:
    """Run the steps with and without the compiled path, those of a list in one iteration of the event loop, and compare
    after each list; returns the world with it."""
    both = [World(compiled=compiled, durable=durable, **limits) for compiled in (True, False)]
    create = [send(0, "PUT", f"/v1/stream/{name}", TYPES[name]) for name in NAMES]
    try:
        for together in [create, *sequence]:
            for world in both:
                World.current = world
                for step in together:
                    step(world)
                for _ in range(20):  # Commits, turns, and what is sent to live readers.
                    await asyncio.sleep(0)
            compiled, usual = (world.state() for world in both)
            assert compiled == usual
        assert not both[1].taken
        return both[0]
    finally:
        for world in both:
            world.close()


def alone(steps: Iterable[Step]) -> list[list[Step]]:
    return [[step] for step in steps]


def run(test: Coroutine[Any, Any, World]) -> World:
    return asyncio.run(test)


@pytest.fixture(autouse=True)
def manual_clock(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "steady" not in request.node.name:
        monkeypatch.setattr(server, "SteadyClock", ManualClock)
        monkeypatch.setattr(creation, "_new_id", lambda: next(World.current.ids))


@given(
    st.lists(st.lists(steps, min_size=1, max_size=4), max_size=12),
    st.booleans(),
    st.sampled_from([20_000, 1_000_000]),
    st.booleans(),
)
def test_any_requests_have_the_same_effects(
    sequence: list[list[Step]], durable: bool, max_memory_bytes: int, fails: bool
) -> None:
    if fails and durable:
        sequence = [*sequence, [fail_writes(), append(0, "a", b"x"), append(1, "a", b"x")], [append(0, "a", b"x")]]
    run(same(sequence, durable=durable, max_stream_bytes=MAX_STREAM_BYTES, max_memory_bytes=max_memory_bytes))


both_kinds = pytest.mark.parametrize("durable", [False, True], ids=["memory", "durable"])


@both_kinds
@pytest.mark.parametrize("name", NAMES)
def test_repeated_appends_take_the_compiled_path(name: str, durable: bool) -> None:
    body = b"[1,2]" if name == "j" else b"x"
    world = run(same(alone([append(0, name, body)] * 10), durable=durable))
    assert world.taken == 9
    assert world.engine.metrics.appends == 10
    assert world.clients[0][0]._quick_turns >= 9


@both_kinds
def test_appends_to_streams_in_turn_take_the_compiled_path(durable: bool) -> None:
    world = run(same(alone([append(0, "a", b"x"), append(0, "b", b"x")] * 10), durable=durable))
    assert world.taken == 19  # The headers are known at the second stream already.


def test_appends_of_one_iteration_are_one_commit() -> None:
    together = [append(client, "a", b"x") for client in range(CONNECTIONS)]
    world = run(same([together] * 5, durable=True))
    assert world.taken == 5 * CONNECTIONS - 1
    assert world.disk.batches[-5:] == [CONNECTIONS] * 5


def test_append_whose_write_fails_is_refused() -> None:
    world = run(
        same([[append(0, "a", b"x")], [append(0, "a", b"x")], [fail_writes(), append(0, "a", b"x")]], durable=True)
    )
    assert world.taken == 2
    assert b"HTTP/1.1 503" in world.clients[0][1].written[-1]
    assert len(world.journal) == len(NAMES) + 2


@pytest.mark.parametrize("step", [lose(0), drain(0), append(0, "a", b"y", times=2), unread(0)])
def test_connection_may_change_before_the_append_is_durable(step: Step) -> None:
    first = [[append(0, "a", b"x")]] * 3
    world = run(same([*first, [append(0, "a", b"x"), step], [append(1, "a", b"x")]], durable=True))
    assert world.taken == 4


relayed = st.tuples(names, bodies, st.sampled_from(["text/plain", "application/json"]), st.booleans())


@given(st.lists(relayed, min_size=1, max_size=12))
def test_relayed_requests_have_the_same_effects(sequence: list[tuple[str, bytes, str, bool]]) -> None:
    async def test() -> World:
        both = [World(compiled=False, durable=False, max_stream_bytes=MAX_STREAM_BYTES) for _ in range(2)]
        compiled, usual = both
        for world in both:
            World.current = world
            for name in NAMES:
                send(0, "PUT", f"/v1/stream/{name}", TYPES[name])(world)
                append(0, name, b"1")(world)
                await asyncio.sleep(0)
        for name, body, content_type, is_followed in sequence:
            data = encode("POST", f"/v1/stream/{name}", body, content_type)
            if is_followed:
                for world in both:
                    send(1, "GET", f"/v1/stream/{name}?offset=-1&live=sse")(world)
            known = compiled.router.head_cache.find(data)
            respond = compiled.context.response_to_known
            assert respond is not None
            response = respond(known, data, time.perf_counter()) if known is not None else None
            for world, (connection, transport) in ((each, each.clients[0]) for each in both):
                if world is usual or response is None:
                    connection.data_received(data)
                else:
                    transport.write(response)
                    compiled.taken += 1
            for _ in range(20):
                await asyncio.sleep(0)
            states = [
                {key: value for key, value in world.state().items() if key not in AT_CONNECTION} for world in both
            ]
            assert states[0] == states[1]
        for world in both:
            world.close()
        return compiled

    run(test())


@both_kinds
def test_relayed_append_is_complete_at_once_in_memory_only(durable: bool) -> None:
    async def test() -> World:
        world = World.current = World(compiled=True, durable=durable)
        send(0, "PUT", "/v1/stream/a")(world)
        await asyncio.sleep(0)
        append(0, "a", b"x")(world)
        await asyncio.sleep(0)
        data = encode("POST", "/v1/stream/a", b"x")
        known = world.router.head_cache.find(data)
        assert known is not None
        assert world.context.response_to_known is not None
        response = world.context.response_to_known(known, data, time.perf_counter())
        if durable:
            assert response is None
        else:
            assert response is not None
            assert response.startswith(b"HTTP/1.1 204")
        world.close()
        return world

    assert run(test()).engine.metrics.appends == (1 if durable else 2)


def test_blocks_are_completed_in_the_same_way() -> None:
    body = b"b" * 3_000
    world = run(same(alone([append(0, "a", body)] * (3 * BLOCK_BYTES // len(body))), durable=False))
    assert world.taken > 2 * BLOCK_BYTES // len(body)
    tail = world.tails[world.engine.catalog.by_name["a"].id]
    assert tail._blocks is not None
    assert len(tail._blocks) == 2


@pytest.mark.parametrize("content_type", ["text/plain; charset=utf-8", "Text/Plain", "application/json", "a/b"])
def test_other_content_types_take_the_usual_way(content_type: str) -> None:
    world = run(same(alone([append(0, "a", b"x", as_type=content_type)] * 5), durable=False))
    assert world.taken == 0


@both_kinds
def test_steady_slow_request_is_counted_in_its_bucket(durable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> World:
        world = World(compiled=True, durable=durable)
        for step in (send(0, "PUT", "/v1/stream/a"), append(0, "a", b"x")):
            step(world)
            await asyncio.sleep(0)
        _, transport = world.clients[0]
        write = transport.write

        def slow(data: bytes) -> None:
            until_s = time.perf_counter() + 0.002
            while time.perf_counter() < until_s:
                pass
            write(data)

        monkeypatch.setattr(transport, "write", slow)
        append(0, "a", b"x")(world)
        await asyncio.sleep(0)
        world.close()
        return world

    world = run(test())
    histogram = world.engine.metrics.request_seconds["append"]
    assert world.taken == 1
    assert sum(histogram.counts[3:]) == 1
    assert histogram.total > 0.002


def test_times_are_those_of_the_steady_clock() -> None:
    async def test() -> World:
        world = World(compiled=True, durable=False)
        send(0, "PUT", "/v1/stream/a")(world)
        for _ in range(3):
            append(0, "a", b"x")(world)
        world.close()
        return world

    before_ms = int(time.time() * 1000) - 1
    world = run(test())
    stream = world.engine.catalog.by_name["a"]
    assert world.taken == 2
    assert before_ms <= stream.written_ms <= int(time.time() * 1000) + 1
    assert stream.accessed_ms == stream.written_ms
    assert world.tails[stream.id].times[-1] == stream.written_ms


def test_class_without_the_expected_slots_is_refused() -> None:
    class Other:
        __slots__ = ()

    with pytest.raises(TypeError, match=r"Other\._input is not a slot"):
        native.PlainAppendPath({"Connection": Other}, {})


def has_compiled_path() -> bool:
    """Whether a new server has the compiled path."""

    async def look() -> bool:
        settings = Settings(storage=StorageSettings(mode="memory"))
        loop = asyncio.get_running_loop()
        engine = server.build_engine(settings, open_store(settings.storage), loop)
        return server.build_context(settings, engine, None, loop, 10).append_known is not None

    return asyncio.run(look())


def test_server_starts_without_the_path_if_objects_are_stored_in_another_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert has_compiled_path()
    without_slots = type("Repeat", (), {"beginning": b"", "target": None})
    monkeypatch.setattr(compiled_appends, "_CLASSES", (*compiled_appends._CLASSES, without_slots))

    assert not has_compiled_path()
    assert "the compiled path cannot be used: Repeat.beginning is not a slot" in caplog.text


def test_pure_build_has_no_compiled_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "PlainAppendPath", None)

    assert not has_compiled_path()
