"""Every response on a pipelined connection is the model's response to its request, however the bytes are split."""

from __future__ import annotations

import random
import time

import h11
import httpx
import pytest

from tests.pressure import malformed
from tests.pressure.faults import FUZZ_FAULTS
from tests.pressure.fuzz import Replies, compare, run_against_server
from tests.pressure.script import Mismatch, Script, Step, Wake
from tests.serving import serve

REQUESTS = {"memory": 14_000, "file-durable": 3_000, "pure": 3_000}
REQUESTS_LONG = {"memory": 900_000, "file-durable": 60_000, "acid": 40_000, "pure": 100_000}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["memory", "file-durable", "acid", "pure"])
def test_pipelined_requests_get_the_models_responses(mode: str, long: bool) -> None:
    seed = time.time_ns() % 10**9 if long else 20_262
    requests = REQUESTS_LONG[mode] if long else REQUESTS.get(mode, 1_000)
    print(f"seed {seed}")  # noqa: T201 - shown with a failure, to replay it
    is_pure = mode == "pure"  # In memory, without the compiled functions.
    counts = run_against_server(requests=requests, seed=seed, mode="memory" if is_pure else mode, pure=is_pure)
    assert counts["answered"] > requests * 0.7
    for what in ("slow", "paused", "vanish", "waits", "events", "settled"):
        assert counts[what] > requests / 2_000, f"too few {what} for a check: {counts}"


@pytest.mark.parametrize("fault", FUZZ_FAULTS)
def test_fault_is_detected(fault: str) -> None:
    with pytest.raises(Mismatch):
        run_against_server(requests=6_000, seed=5, program=("tests.pressure.faults", fault))


def test_h11_parses_every_request_as_intended() -> None:
    """An independent check of the encodings that the script uses: chunks, extensions, trailers, white space, case."""
    script = Script(random.Random(3), "h11", Wake("/v1/stream/w"))
    steps = [script.step() for _ in range(1_500)]
    server = h11.Connection(h11.SERVER)
    server.receive_data(b"".join(step.data for step in steps))
    for step in steps:
        request = server.next_event()
        assert isinstance(request, h11.Request), request
        assert (request.method.decode(), request.target.decode()) == (step.method, step.target)
        body = b""
        while isinstance(event := server.next_event(), h11.Data):
            body += event.data
        assert isinstance(event, h11.EndOfMessage)
        assert body == step.body
        server.send(h11.Response(status_code=204, headers=[]))
        server.send(h11.EndOfMessage())
        server.start_next_cycle()


def judge_malformed(program: tuple[str, ...], mutations: int, seed: int) -> int:
    with serve(program=program) as server:
        httpx.put(server.stream_url("malformed"), headers={"Content-Type": "text/plain"})
        return malformed.check(server.port, mutations, seed)


def test_server_does_not_parse_more_requests_than_h11(long: bool) -> None:
    mutations = 50_000 if long else 1_500
    seed = time.time_ns() % 10**9 if long else 7
    accepted = judge_malformed(("headwater",), mutations, seed)
    assert mutations / 50 < accepted < mutations / 2, (
        "too many or too few mutated requests are accepted for a comparison"
    )


def test_server_that_accepts_malformed_heads_is_detected() -> None:
    with pytest.raises(Mismatch):
        judge_malformed(("tests.pressure.faults", "forgives_malformed_heads"), 3_000, 7)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 204 No Content\r\nStream-Next-Offset: 0000000000000001_0000000000000002\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nStream-Next-Offset: 0000000000000001_0000000000000001\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\nStream-Closed: true\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\nStream-Next-Offset: a\r\nStream-Next-Offset: a\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
    ],
    ids=["offset", "status", "missing", "twice", "framing"],
)
def test_wrong_response_is_a_mismatch(answer: bytes) -> None:
    replies = Replies()
    replies.feed(answer)
    step = Step(b"", "POST", "/v1/stream/s", b"x", 204, {"next": f"{1:016x}_{1:016x}", "closed": False})
    with pytest.raises(Mismatch):
        judge(replies, step)


def judge(replies: Replies, step: Step) -> None:
    reply = replies.next(step.method)
    assert reply is not None
    compare(step, reply)
