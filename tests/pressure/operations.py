"""Operations that may block the event loop, each with its worst legal input.

An `Operation` prepares its input and then drives the server; `Load.share` scales the input, so that the same list
serves the quick test (CPU time per iteration) and the full measurement (wall-clock stalls). Add an entry for every
operation whose cost a client can choose.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random

from headwater.config import StorageSettings
from headwater.core.buckets import stream_name
from headwater.core.rules import CreateRequest
from headwater.engine.engine import Engine
from headwater.engine.open_storage import open_store
from headwater.engine.quota import EngineLimits
from tests.engine.seams import ManualClock, ManualScheduler
from tests.http.raw import RawConnection, encode
from tests.pressure.load import JSON, MIB, TEXT, Load, Operation, no_preparation
from tests.waiting import wait_until

CHECKPOINT_S = 1.0
"""Long enough for the checkpoint that an operation began."""

# -- appending


def json_elements(load: Load) -> None:
    """As many elements as fit into the body; beyond the limit of elements the response is 413."""
    load.must("PUT", "/v1/stream/tiny", JSON)
    count = load.size(20 * MIB) // 2
    response = load.send("POST", "/v1/stream/tiny", JSON, b"[" + b"0," * count + b"0]")
    assert response.status in {204, 413}, response


def json_at_limit(load: Load) -> None:
    """The largest batch of tiny elements that is accepted, found by halving."""
    load.must("PUT", "/v1/stream/limit", JSON)
    count = load.size(10 * MIB)
    while count > 1:
        response = load.send("POST", "/v1/stream/limit", JSON, b"[" + b"0," * (count - 1) + b"0]")
        if response.status == 204:
            return
        assert response.status == 413, response
        count = count * 3 // 4


def json_large(load: Load) -> None:
    load.must("PUT", "/v1/stream/large", JSON)
    element = json.dumps({"key": "k" * 200, "value": {"text": "v" * 700, "number": 1.5}}).encode()
    count = load.size(60 * MIB) // (len(element) + 1)
    assert load.send("POST", "/v1/stream/large", JSON, b"[" + b",".join([element] * count) + b"]").status in {204, 413}


def json_deep(load: Load) -> None:
    """One value nested as deep as the parser allows, in a body as large as is accepted."""
    load.must("PUT", "/v1/stream/deep", JSON)
    nested = b"[" * 400 + b"]" * 400
    body = b"[" + b",".join([nested] * (load.size(20 * MIB) // len(nested))) + b"]"
    assert load.send("POST", "/v1/stream/deep", JSON, body).status in {204, 400, 413}


def json_malformed(load: Load) -> None:
    """Bodies that are refused only at their end."""
    load.must("PUT", "/v1/stream/malformed", JSON)
    size = load.size(60 * MIB)
    for body in (
        b" " * size,
        b"[" + b" " * size + b"x]",
        b'["' + rb"\n" * (size // 2) + b'"x]',
        b'["' + rb"\"" * (size // 2),
    ):
        assert load.send("POST", "/v1/stream/malformed", JSON, body).status in {400, 413}


def big_append(load: Load) -> None:
    load.must("PUT", "/v1/stream/big", TEXT)
    body = b"b" * load.size(60 * MIB)
    for _ in range(3):
        assert load.send("POST", "/v1/stream/big", TEXT, body).status in {204, 413, 503}


def big_appends_together(load: Load) -> None:
    load.must("PUT", "/v1/stream/big", TEXT)
    body = b"b" * load.size(16 * MIB)
    load.together(lambda _: load.send("POST", "/v1/stream/big", TEXT, body), 8)


def chunked_bytes(load: Load) -> None:
    """A body in chunks of one byte each."""
    load.must("PUT", "/v1/stream/chunks", TEXT)
    with load.connect() as connection:
        connection.send(
            encode("POST", "/v1/stream/chunks", headers={**TEXT, "Transfer-Encoding": "chunked"})
            + b"1\r\nx\r\n" * load.size(8 * MIB // 6)
            + b"0\r\n\r\n"
        )
        assert connection.response().status in {204, 413}


def trailer(load: Load) -> None:
    """An endless trailer line."""
    load.must("PUT", "/v1/stream/trailer", TEXT)
    with load.connect() as connection:
        connection.send(encode("POST", "/v1/stream/trailer", headers={**TEXT, "Transfer-Encoding": "chunked"}))
        connection.send(b"1\r\nx\r\n0\r\nX-Trailer: ")
        piece = b"t" * 65_536
        try:
            for _ in range(load.size(39 * MIB) // len(piece)):
                connection.send(piece)
        except OSError:
            return  # Rejected and closed, as it should be.


def small_appends(load: Load) -> None:
    path = "/v1/stream/small"
    load.must("PUT", path, TEXT)
    count = load.size(20_000)
    load.together(lambda _: load.many(("POST", path, TEXT, b"x" * 100) for _ in range(count // 8)), 8)


# -- reading


def tiny_messages(load: Load) -> None:
    load.fill_json("/v1/stream/tiny", load.size(2_000_000))


def hundred_megabytes(load: Load) -> None:
    load.fill("/v1/stream/long", load.size(200 * MIB), 65_536)


def catch_up(load: Load) -> None:
    offset = "-1"
    with load.connect() as connection:
        while True:
            response = connection.request("GET", f"/v1/stream/long?offset={offset}")
            assert response.status == 200
            offset = response.header("stream-next-offset") or ""
            if response.header("stream-up-to-date"):
                return


def cold_reads(load: Load) -> None:
    load.together(lambda _: catch_up(load), 4)


def sse_catch_up(load: Load) -> None:
    assert load.drain("/v1/stream/long?offset=-1&live=sse", until=b'"upToDate":true') > load.size(190 * MIB)


def sse_tiny(load: Load) -> None:
    load.drain("/v1/stream/tiny?offset=-1&live=sse", until=b'"upToDate":true')


def prepare_newlines(load: Load) -> None:
    load.must("PUT", "/v1/stream/lines", TEXT)
    load.must("POST", "/v1/stream/lines", TEXT, b"\n" * load.size(8 * MIB))


def sse_newlines(load: Load) -> None:
    load.drain("/v1/stream/lines?offset=-1&live=sse", until=b'"upToDate":true')


def sse_fan_out(load: Load) -> None:
    """Many waiting readers receive one large message."""
    load.must("PUT", "/v1/stream/fan", TEXT)
    readers = load.size(200, 10)
    begun = threading.Barrier(readers + 1)
    size = load.size(MIB)

    def read(_: int) -> None:
        with load.connect() as connection:
            connection.send(encode("GET", "/v1/stream/fan?offset=-1&live=sse"))
            connection.response_head()
            begun.wait()
            total = 0
            while total < size:
                total += len(connection.socket.recv(MIB))

    def append() -> None:
        begun.wait()
        load.must("POST", "/v1/stream/fan", TEXT, b"f" * size)

    appending = threading.Thread(target=append)
    appending.start()
    load.together(read, readers)
    appending.join()


def long_poll_herd(load: Load) -> None:
    """One append completes many long-polls."""
    load.must("PUT", "/v1/stream/herd", TEXT)
    count = load.size(500, 50)
    request = encode("GET", "/v1/stream/herd?offset=-1&live=long-poll")
    connections = [RawConnection(load.server) for _ in range(count)]
    try:
        for connection in connections:
            connection.send(request)
        time.sleep(0.3)
        load.must("POST", "/v1/stream/herd", TEXT, b"h" * 50_000)
        for connection in connections:
            assert connection.response().status == 200
    finally:
        for connection in connections:
            connection.socket.close()


def splits(load: Load) -> None:
    load.must("GET", "/v1/stream/tiny?offset=-1&splits=10000")


def find(load: Load) -> None:
    load.must("GET", "/v1/stream/tiny?offset=-1&find=1")
    load.must("GET", "/v1/stream/tiny?offset=-1&find=nothing")


def repeated_letters(load: Load) -> None:
    load.must("PUT", "/v1/stream/letters", TEXT)
    load.many(("POST", "/v1/stream/letters", TEXT, b"m" * 500) for _ in range(2_000))


def find_across(load: Load) -> None:
    """A text that occurs at every byte, and always spans two messages."""
    load.must("GET", f"/v1/stream/letters?offset=-1&find={'m' * 600}")


def pairs(load: Load) -> None:
    """Messages that each end with the first half of a text and begin with the second half."""
    load.must("PUT", "/v1/stream/pairs", JSON)
    batch = b"[" + b",".join([b"1"] * 2_000) + b"]"
    load.many(("POST", "/v1/stream/pairs", JSON, batch) for _ in range(load.size(250)))


def find_pairs(load: Load) -> None:
    load.must("GET", "/v1/stream/pairs?offset=-1&find=,1")


def compressible(load: Load) -> None:
    load.fill("/v1/stream/compressible", load.size(100 * MIB), 65_536)


def compressed_reads(load: Load) -> None:
    def read(number: int) -> None:
        headers = {"Accept-Encoding": ("gzip", "zstd", "deflate")[number % 3]}
        offset = "-1"
        with load.connect() as connection:
            for _ in range(load.size(100)):
                response = connection.request("GET", f"/v1/stream/compressible?offset={offset}", headers=headers)
                assert response.status == 200
                offset = response.header("stream-next-offset") or ""

    load.together(read, 6)


def compressed_herd(load: Load) -> None:
    """Many readers of a chunk that is not compressed yet."""
    load.must("PUT", "/v1/stream/herd", TEXT)
    random = Random(load.server.port)
    load.must("POST", "/v1/stream/herd", TEXT, random.randbytes(MIB // 2).hex().encode())
    wanted = encode("GET", "/v1/stream/herd?offset=-1", headers={"Accept-Encoding": "gzip"})
    with ExitStack() as opened:
        readers = [opened.enter_context(load.connect()) for _ in range(load.size(500, 20))]
        for reader in readers:
            reader.send(wanted)
        for reader in readers:
            assert reader.response().status == 200


def accept_encoding(load: Load) -> None:
    """Headers that an ambiguous pattern would need quadratic time to reject."""
    load.fill("/v1/stream/accepting", 4_000, 2_000)
    for value in ("gzip" + " " * 30_000 + "!", "a," * 15_000, "gzip;q=" + "0" * 30_000):
        load.must("GET", "/v1/stream/accepting?offset=-1", {"Accept-Encoding": value})


def frames(load: Load) -> None:
    load.must("GET", "/v1/stream/tiny?offset=-1&frames=1")


# -- forks


def fork_chain(load: Load) -> None:
    load.must("PUT", "/v1/stream/fork/0", TEXT)
    load.must("POST", "/v1/stream/fork/0", TEXT, b"root;")
    for number in range(1, load.size(1_000)):
        headers = {"Stream-Forked-From": f"/v1/stream/fork/{number - 1}"}
        response = load.send("PUT", f"/v1/stream/fork/{number}", headers)
        if response.status in {400, 409, 413}:
            return  # The depth limit.
        assert response.status == 201, response
        load.must("POST", f"/v1/stream/fork/{number}", TEXT, b"%d;" % number)


def deepest(load: Load) -> int:
    number = 0
    while load.send("HEAD", f"/v1/stream/fork/{number + 1}").status == 200:
        number += 1
    return number


def fork_reads(load: Load) -> None:
    last = deepest(load)
    load.must("GET", f"/v1/stream/fork/{last}?offset=-1")
    load.must("GET", f"/v1/stream/fork/{last}?offset=-1&splits=10000")
    load.must("GET", f"/v1/stream/fork/{last}?offset=-1&frames=1")
    # From the root up, so that the last deletion frees the whole chain.
    for number in range(last + 1):
        load.must("DELETE", f"/v1/stream/fork/{number}")


# -- buckets


def bucket_stream(load: Load) -> None:
    load.bucket("/ds/large")
    load.fill("/ds/large/s", load.size(200 * MIB), 65_536)


def bootstrap(load: Load) -> None:
    assert load.drain("/ds/large/s/bootstrap") > load.size(190 * MIB)


def snapshot(load: Load) -> None:
    load.bucket("/ds/large")
    load.must("PUT", "/ds/large/s", TEXT)
    tail = load.must("POST", "/ds/large/s", TEXT, b"one").header("stream-next-offset")
    load.must("PUT", f"/ds/large/s/snapshot/{tail}", TEXT, b"s" * load.size(400 * MIB))


def snapshot_read(load: Load) -> None:
    tail = load.send("HEAD", "/ds/large/s").header("stream-next-offset")
    assert load.drain(f"/ds/large/s/snapshot/{tail}") > load.size(390 * MIB)


def many_in_bucket(load: Load) -> None:
    load.bucket("/ds/many-streams")
    load.many(("PUT", f"/ds/many-streams/{number:06d}", TEXT, b"") for number in range(load.size(20_000)))


def listing(load: Load) -> None:
    load.must("GET", "/ds/many-streams/streams?limit=1000")
    load.must("GET", "/ds/many-streams/streams")
    load.must("GET", "/ds?limit=1000")


DAY_SECS = 24 * 3600


def expired_streams(directory: Path, share: float) -> None:
    """A bucket as a server left it 40 days ago. The next one keeps its expired streams, because the clock jumped."""
    clock = ManualClock(int((time.time() - 40 * DAY_SECS) * 1000))
    scheduler = ManualScheduler(clock)
    storage = open_store(StorageSettings(mode=HELD_MODE, data_dir=directory)).storage
    engine = Engine(storage, clock, scheduler, EngineLimits())
    engine.start()
    engine.buckets.create("held", lambda _: None)
    scheduler.run_until_idle()
    for number in range(max(1, int(60_000 * share))):
        name = stream_name("held", f"{number:06d}")
        engine.create(CreateRequest(name, "text/plain", 30 * DAY_SECS, None, False, b""), lambda _: None)
    scheduler.run_until_idle()
    engine.stop()


def held_listing(load: Load) -> None:
    """Listings that skip every expired stream."""
    load.must("PUT", "/ds/held/z", TEXT)
    load.must("PUT", "/v1/stream/z", TEXT)
    with load.connect() as connection:
        for target in ("/ds/held/streams?limit=10", "/v1/stream/__ds/streams?limit=10"):
            connection.send(encode("GET", target) * 8)
            for _ in range(8):
                assert b'"z"' in connection.response().body


# -- changes

CHANGES = "/v1/stream/__ds/streams?live=long-poll"


def many_changes(load: Load) -> None:
    """Streams that changed after the first cursor."""
    load.must("GET", CHANGES)
    count = load.size(20_000)
    load.many(("PUT", f"/v1/stream/changed/{number}", TEXT, b"") for number in range(count))


def changes_cursor(load: Load) -> str:
    cursor: str = json.loads(load.must("GET", CHANGES).body)["changes_cursor"]
    return cursor


def change_waiters(load: Load) -> None:
    """Many requests that wait for changes of other streams, then for those of one."""
    first = changes_cursor(load).partition("_")[0] + "_0"
    load.must("GET", f"{CHANGES}&cursor={first}&limit=10")
    waiters = load.size(900, 300)
    for prefix, posts in (("other/", load.size(20_000)), ("changed/", 1)):
        cursor = changes_cursor(load)
        with ExitStack() as opened:
            waiting = [opened.enter_context(load.connect()) for _ in range(waiters)]
            for connection in waiting:
                connection.send(encode("GET", f"{CHANGES}&cursor={cursor}&prefix={prefix}"))
            load.must("GET", "/healthz")
            load.many(("POST", f"/v1/stream/changed/{number}", TEXT, b"c") for number in range(posts))
            if prefix == "other/":
                load.must("PUT", "/v1/stream/other/1", TEXT)
            for connection in waiting:
                assert connection.response().status == 200


# -- subscriptions


def many_links(load: Load) -> None:
    load.must("PUT", "/v1/stream/wakes", JSON)
    load.many(("PUT", f"/v1/stream/links/{number:06d}", TEXT, b"") for number in range(load.size(20_000)))
    for number in range(10):
        wanted = {"type": "pull-wake", "pattern": "links/*", "wake_stream": "wakes"}
        load.must("PUT", f"/v1/stream/__ds/subscriptions/s{number}", JSON, json.dumps(wanted).encode())


def list_subscriptions(load: Load) -> None:
    load.must("GET", "/v1/stream/__ds/subscriptions")
    load.must("GET", "/v1/stream/__ds/subscriptions/s0")


def globs(load: Load) -> None:
    """Patterns that match the same long name in many ways."""
    for number in range(load.size(60, 4)):
        subscribe(load, f"g{number}", "**/a/*/" * 8 + f"b{number}")
    long_names(load, load.size(20, 2))


def many_long_names(load: Load) -> None:
    long_names(load, load.size(200, 20))


def glob_backlog(load: Load) -> None:
    """One subscription whose pattern is compared with all existing names."""
    subscribe(load, "backlog", "**/a/*/" * 8 + "b")
    subscribe(load, "everything", "**/a/*/" * 7 + "**")


def subscribe(load: Load, name: str, pattern: str) -> None:
    load.send("PUT", "/v1/stream/wakes", JSON)
    wanted = {"type": "pull-wake", "pattern": pattern, "wake_stream": "wakes"}
    load.must("PUT", f"/v1/stream/__ds/subscriptions/{name}", JSON, json.dumps(wanted).encode())


def long_names(load: Load, count: int) -> None:
    """Names with as many segments as fit: 512, less the number at the end."""
    name = "/".join(["a"] * load.size(509, 100))
    for number in range(count):
        load.must("PUT", f"/v1/stream/{name}/{number}", TEXT)


# -- connections and maintenance


def pipelined(load: Load) -> None:
    """Many requests in one segment, whose responses are not read for a while."""
    load.must("PUT", "/v1/stream/pipe", TEXT)
    load.must("POST", "/v1/stream/pipe", TEXT, b"p" * 30_000)
    count = load.size(2_000, 60)
    with load.connect() as connection:
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        sending = threading.Thread(target=connection.send, args=(encode("GET", "/v1/stream/pipe?offset=-1") * count,))
        sending.start()
        time.sleep(0.3)
        for _ in range(count):
            assert connection.response().status == 200
        sending.join()


def pipelined_posts(load: Load) -> None:
    load.must("PUT", "/v1/stream/posts", TEXT)
    count = load.size(2_000, 60)
    with load.connect() as connection:
        connection.send(encode("POST", "/v1/stream/posts", headers=TEXT, body=b"x" * 20) * count)
        for _ in range(count):
            assert connection.response().status == 204


def pipelined_200(load: Load, *targets: str, method: str = "GET") -> None:
    """The same costly request 200 times in one segment, for each of these targets."""
    for target in targets:
        with load.connect() as connection:
            connection.send(encode(method, target) * 200)
            for _ in range(200):
                assert connection.response(head=method == "HEAD").status == 200


def searched(load: Load) -> None:
    load.fill_json("/v1/stream/searched", load.size(50_000))


def pipelined_finds(load: Load) -> None:
    path = "/v1/stream/searched?offset=-1"
    pipelined_200(load, f"{path}&find=nothing", f"{path}&find=0,0,0", f"{path}&frames=1")


def finds_at_once(load: Load) -> None:
    """One search on each of 60 connections, received together."""
    wanted = encode("GET", "/v1/stream/searched?offset=-1&find=0,0,0")
    with ExitStack() as opened:
        searchers = [opened.enter_context(load.connect()) for _ in range(60)]
        for searcher in searchers:
            searcher.send(wanted)
        for searcher in searchers:
            assert searcher.response().status == 200


def pipelined_fork_reads(load: Load) -> None:
    path = f"/v1/stream/fork/{deepest(load)}?offset=-1"
    pipelined_200(load, path, f"{path}&frames=1", f"{path}&find=q")
    fork_reads(load)


def pipelined_metrics(load: Load) -> None:
    pipelined_200(load, "/metrics", method="HEAD")


def timeouts(load: Load) -> None:
    """Connections without a request, and with a part of one, that time out together."""
    begun = (encode("GET", "/healthz"), b"POST /v1/stream/half HTTP/1.1\r\nHost: localhost\r\nContent-Le")
    with ExitStack() as opened:
        connections = [opened.enter_context(load.connect()) for _ in range(load.size(8_000))]
        for number, connection in enumerate(connections):
            connection.send(begun[number % 2])
        for number, connection in enumerate(connections):
            assert connection.response().status == (200, 408)[number % 2]
            assert connection.ends()


def header_fields(load: Load) -> None:
    """As many header fields as fit, repeatedly."""
    fields = {f"X{number}": "v" for number in range(2_500)}
    load.must("PUT", "/v1/stream/heads", TEXT)
    request = encode("GET", "/v1/stream/heads", headers=fields)
    with load.connect() as connection:
        for _ in range(load.size(200, 20)):
            connection.send(request)
            assert connection.response().status in {200, 431}


def producers(load: Load) -> None:
    path = "/v1/stream/producers"
    load.must("PUT", path, TEXT)
    headers = [
        {**TEXT, "Producer-Id": f"producer-{number}", "Producer-Epoch": "0", "Producer-Seq": "0"}
        for number in range(load.size(100_000))
    ]
    load.together(lambda number: load.many(("POST", path, each, b"x") for each in headers[number::16]), 16)


def checkpoints(load: Load) -> None:
    """Appends that roll segments while a stream with many producers is checkpointed."""
    path = "/v1/stream/producers"
    load.many(("POST", path, TEXT, b"c" * 50_000) for _ in range(100))
    time.sleep(CHECKPOINT_S)


def checkpoint_messages(load: Load) -> None:
    """Appends until half of the hot tail is unsaved, and while the index of many one-byte messages is saved."""
    load.must("PUT", "/v1/stream/other", TEXT)
    load.many(("POST", "/v1/stream/other", TEXT, b"c" * 50_000) for _ in range(load.size(600, 20)))
    time.sleep(CHECKPOINT_S)


def expiring(load: Load) -> None:
    """Many streams that expire in the same second."""
    count = load.size(20_000)
    load.many(("PUT", f"/v1/stream/brief/{number}", {**TEXT, "Stream-TTL": "1"}, b"") for number in range(count))
    time.sleep(2.5)


def retained(load: Load) -> None:
    """Many streams whose messages reach their age together."""
    count = load.size(20_000)
    headers = {**TEXT, "Stream-Retention-Age": "1", "Stream-Retention-Drop": "allowed"}
    load.many(("PUT", f"/v1/stream/aged/{number}", headers, b"old") for number in range(count))
    last = f"/v1/stream/aged/{count - 1}"
    wait_until(lambda: load.must("HEAD", last).header("stream-earliest-offset"), what="the last message to be dropped")


def many_to_follow(load: Load) -> None:
    names = (f"/v1/stream/many/{number}" for number in range(load.size(20_000)))
    load.many(("PUT", name, TEXT, b"m" * 100) for name in names)


def follow_many(load: Load) -> None:
    """All streams of a prefix from their beginning, then one message for each of them."""
    body = json.dumps({"prefix": "many/"}).encode()
    session = json.loads(load.must("POST", "/v1/stream/__ds/follow", JSON, body).body)["id"]
    target = f"/v1/stream/__ds/follow/{session}"
    assert load.drain(target, until=b'{"upToDate":true}') > 0
    load.many(("POST", f"/v1/stream/many/{number}", TEXT, b"n" * 100) for number in range(load.size(20_000)))


def follow_names(load: Load) -> None:
    """As many names as one request may have, and as many as fit into a body."""
    for count, expected in ((10_000, 201), (70_000, 413)):
        names = ",".join(f'"n{number}":"-1"' for number in range(count))
        response = load.send("POST", "/v1/stream/__ds/follow", JSON, b'{"streams":{%b}}' % names.encode())
        assert response.status == expected, response


def create_followed(load: Load) -> None:
    """Streams created under a prefix that has the maximum number of followers."""
    body = json.dumps({"prefix": "new/"}).encode()
    with ExitStack() as opened:
        for _ in range(load.size(900, 20)):
            session = json.loads(load.must("POST", "/v1/stream/__ds/follow", JSON, body).body)["id"]
            reader = opened.enter_context(load.connect())
            reader.send(encode("GET", f"/v1/stream/__ds/follow/{session}"))
        load.many(("PUT", f"/v1/stream/new/{number}", TEXT, b"n") for number in range(load.size(100, 40)))


def leases(load: Load) -> None:
    """Many writer leases that expire in the same second."""
    count = load.size(10_000)
    terms = json.dumps({"holder": "w", "ttl_ms": 1000, "append": "the writer was lost"}).encode()
    headers = {"Content-Type": "application/vnd.headwater.lease+json"}
    load.many(("PUT", f"/v1/stream/leased/{number}", TEXT, b"") for number in range(count))
    load.many(("POST", f"/v1/stream/leased/{number}?lease=acquire", headers, terms) for number in range(count))
    last = f"/v1/stream/leased/{count - 1}"
    wait_until(lambda: load.must("HEAD", last).header("stream-closed"), what="the last lease to expire")


def metrics(load: Load) -> None:
    for _ in range(20):
        load.must("GET", "/metrics")


HELD_MODE = "file-fast"
"""A mode without other operations on streams: their server would keep all expired streams."""
LARGE_MEMORY = {"DS_LIMITS__MAX_MEMORY_BYTES": str(4 * 1024 * MIB), "DS_LIMITS__MAX_STREAM_BYTES": "0"}
COLD = {"DS_STORAGE__HOT_TAIL_BYTES": str(MIB), "DS_STORAGE__SEGMENT_BYTES": str(4 * MIB)}
SMALL_SEGMENTS = {"DS_STORAGE__SEGMENT_BYTES": str(MIB), "DS_STORAGE__HOT_TAIL_BYTES": str(MIB)}


def _memory(
    name: str,
    worst: str,
    drive: Callable[[Load], object],
    prepare: Callable[[Load], object] = no_preparation,
    share: float = 0.05,
) -> Operation:
    return Operation(name, worst, drive, prepare, "memory", LARGE_MEMORY, share)


OPERATIONS: tuple[Operation, ...] = (
    _memory("json-elements", "20 MiB of `0,0,…` in one body", json_elements),
    _memory("json-at-limit", "the largest accepted batch of one-byte elements", json_at_limit),
    _memory("json-large", "60 MiB of ordinary JSON in one body", json_large, share=0.1),
    _memory("json-deep", "20 MiB of values nested 400 deep", json_deep),
    _memory("json-malformed", "60 MiB of white space, and of escapes before an error", json_malformed, share=0.04),
    _memory("append-memory", "60 MiB in one append", big_append, share=0.3),
    Operation("append-file-durable", "60 MiB in one append, three times", big_append, mode="file-durable", share=0.3),
    Operation("append-acid", "60 MiB in one append, three times", big_append, mode="acid", share=0.3),
    Operation("appends-file-durable", "8 appends of 16 MiB at once", big_appends_together, mode="file-durable"),
    _memory("chunked-bytes", "8 MiB of chunks of one byte", chunked_bytes, share=0.1),
    _memory("trailer", "a trailer line of 39 MiB", trailer, share=0.5),
    _memory("small-appends", "20,000 appends on 8 connections", small_appends),
    _memory("catch-up", "200 MiB in chunks of 4 MiB", catch_up, hundred_megabytes),
    Operation("cold-reads", "200 MiB from disk, 4 readers", cold_reads, hundred_megabytes, "file-durable", COLD),
    _memory("sse-catch-up", "200 MiB by SSE to a fast reader", sse_catch_up, hundred_megabytes, share=0.1),
    _memory("sse-tiny", "2,000,000 one-byte JSON messages by SSE", sse_tiny, tiny_messages, share=0.02),
    _memory("sse-newlines", "a message of 8 MiB of newlines by SSE", sse_newlines, prepare_newlines, share=0.1),
    _memory("sse-fan-out", "200 waiting SSE readers, one message of 1 MiB", sse_fan_out, share=0.2),
    _memory("long-poll-herd", "500 long-polls answered by one append", long_poll_herd, share=0.2),
    _memory("splits", "`splits=10000` over 2,000,000 messages", splits, tiny_messages, share=0.1),
    _memory("find", "`find` over one-byte messages", find, tiny_messages, share=0.5),
    _memory("find-across", "`find` of a text that always spans two messages", find_across, repeated_letters, share=1.0),
    _memory("find-pairs", "`find` of a text that every two messages make together", find_pairs, pairs, share=0.1),
    _memory("compressed-reads", "100 MiB compressed, 6 readers, three codings", compressed_reads, compressible),
    _memory("compressed-herd", "500 readers of one chunk that is being compressed", compressed_herd, share=0.2),
    _memory("accept-encoding", "malformed Accept-Encoding of 30 kB", accept_encoding, share=1.0),
    _memory("frames", "`frames=1` over one-byte messages", frames, tiny_messages, share=0.5),
    _memory("fork-chain", "a chain of 1,000 forks read, split and deleted", fork_reads, fork_chain, share=0.1),
    _memory("bootstrap", "200 MiB of updates", bootstrap, bucket_stream, share=0.1),
    Operation("snapshot-read", "a snapshot of 400 MiB", snapshot_read, snapshot, "file-durable", share=0.05),
    _memory("listing", "a bucket of 20,000 streams", listing, many_in_bucket, share=0.1),
    Operation(
        "held-listing",
        "8 pipelined listings of 60,000 expired streams that are kept",
        held_listing,
        mode=HELD_MODE,
        share=0.25,
        write_store=expired_streams,
    ),
    _memory("change-waiters", "900 waiters during 20,000 changes", change_waiters, many_changes, share=0.4),
    _memory("subscriptions", "10 subscriptions of 20,000 links each", list_subscriptions, many_links, share=0.1),
    _memory("globs", "60 patterns of `**/a/*/…` against names of 510 segments", globs, share=0.2),
    _memory("glob-backlog", "2 patterns of `**/a/*/…` over 200 names", glob_backlog, many_long_names, share=0.2),
    _memory("pipelined-reads", "2,000 GETs of 30 kB in one segment, unread at first", pipelined, share=0.1),
    _memory("pipelined-appends", "2,000 appends in one segment", pipelined_posts, share=0.1),
    _memory("pipelined-finds", "600 searches of 50,000 messages, 200 in one segment", pipelined_finds, searched, 0.1),
    _memory("finds-at-once", "a search of 50,000 messages on each of 60 connections", finds_at_once, searched, 0.1),
    _memory(
        "pipelined-fork-reads", "600 reads of 1,000 forks, 200 in one segment", pipelined_fork_reads, fork_chain, 0.1
    ),
    _memory("pipelined-metrics", "200 HEADs of the metrics page in one segment", pipelined_metrics, share=1.0),
    Operation(
        "timeouts",
        "8,000 connections that time out together",
        timeouts,
        mode=HELD_MODE,
        settings={"DS_SERVER__IDLE_TIMEOUT_SECS": "3", "DS_SERVER__READ_TIMEOUT_SECS": "3"},
        share=0.6,
    ),
    _memory("header-fields", "2,500 header fields in each request", header_fields, share=0.2),
    Operation(
        "checkpoint-producers",
        "checkpoints of a stream with 100,000 producers",
        checkpoints,
        producers,
        "file-durable",
        SMALL_SEGMENTS,
        0.05,
    ),
    Operation(
        "checkpoint-messages",
        "a checkpoint of 2,000,000 one-byte messages",
        checkpoint_messages,
        tiny_messages,
        "file-durable",
        share=0.05,
    ),
    _memory("expiry", "20,000 streams that expire together", expiring, share=0.4),
    Operation("expiry-file-durable", "20,000 streams that expire together", expiring, mode="file-durable", share=0.1),
    _memory("retention", "20,000 streams whose messages expire together", retained, share=0.4),
    Operation(
        "retention-file-durable",
        "20,000 streams whose messages expire together",
        retained,
        mode="file-durable",
        share=0.1,
    ),
    _memory("follow-many", "20,000 streams over one connection", follow_many, many_to_follow, share=0.1),
    _memory("follow-names", "10,000 names, and 70,000, in one request to follow", follow_names, share=1.0),
    _memory("create-followed", "100 creations below a prefix with 900 followers", create_followed, share=0.1),
    _memory("leases", "10,000 writer leases that expire together", leases, share=0.2),
    _memory("metrics", "the metrics page with 20,000 streams", metrics, many_in_bucket, share=0.1),
)
BY_NAME = {operation.name: operation for operation in OPERATIONS}
