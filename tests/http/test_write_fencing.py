"""Write fencing: the rules WF-01 to WF-28 of the proposal durable-streams #405/#406."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.http.protocol import Stream, assert_problem, producer, stream_on
from tests.http.subscribing import Subscription, assert_error
from tests.http.webhook_receiver import Reply, receive
from tests.serving import Server, serve

FENCE = {"Write-Fence": "true"}
LEASE_MS = 600_000


class Session:
    """A fenced stream with one message, and a subscription that it wakes."""

    def __init__(self, http: httpx.Client, root: str) -> None:
        self.http = http
        self.stream = Stream(http, f"{root}/s", "application/json").create("[0]", FENCE)
        self.wake_stream = Stream(http, f"{root}-wakes", "application/json").create()
        self.subscription = Subscription(http, root.replace("/", "-"))
        self.subscribe()
        self.stream.append("[1]")

    def subscribe(self) -> None:
        root = self.stream.name.removesuffix("/s")
        self.subscription.pull(self.wake_stream.name, f"{root}/*", lease_ttl_ms=LEASE_MS)

    def write(
        self,
        wake: dict[str, Any],
        seq: int = 0,
        content: str = '"w"',
        *,
        epoch: int | None = None,
        stream: Stream | None = None,
    ) -> httpx.Response:
        """Append with the write token of a claim."""
        given = producer("agent", wake["generation"] if epoch is None else epoch, seq)
        return (stream or self.stream).post(content, {"Write-Token": wake["write_token"], **given})

    def done(self, wake: dict[str, Any]) -> httpx.Response:
        acks = [{"stream": link["path"], "offset": link["tail_offset"]} for link in wake["streams"]]
        return self.subscription.act("ack", wake, acks=acks, done=True)


@pytest.fixture
def session(moving_client: httpx.Client, stream_name: Callable[[], str]) -> Session:
    return Session(moving_client, stream_name())


def assert_fenced(response: httpx.Response, reason: str, **members: object) -> None:
    assert_error(response, 409, "FENCED", reason=reason, **members)
    assert "stream-next-offset" not in response.headers


# -- creating a fenced stream


def test_wf01_a_repeated_put_must_agree_on_the_fence(stream: Stream, json_stream: Stream) -> None:
    stream.create(headers=FENCE)
    assert stream.put(headers=FENCE).status_code == 200
    assert_problem(stream.put(), 409, "config_mismatch")
    json_stream.create(headers={"Write-Fence": "yes"})
    assert_problem(json_stream.put(headers=FENCE), 409, "config_mismatch")


def test_wf02_the_fence_is_echoed_on_put_and_head(stream: Stream, json_stream: Stream) -> None:
    assert stream.put(headers=FENCE).headers["write-fence"] == "true"
    assert stream.put(headers=FENCE).headers["write-fence"] == "true"
    assert stream.head().headers["write-fence"] == "true"
    assert "write-fence" not in json_stream.put().headers
    assert "write-fence" not in json_stream.head().headers


def test_wf03_a_fork_does_not_inherit_the_fence(session: Session) -> None:
    forks = [Stream(session.http, f"{session.stream.name}-{number}", "") for number in range(2)]
    source = {"Stream-Forked-From": session.stream.path}
    assert "write-fence" not in forks[0].put(headers=source).headers
    assert forks[1].put(headers=source | FENCE).headers["write-fence"] == "true"


def test_wf04_without_subscriptions_the_opt_in_is_501() -> None:
    with serve(DS_SUBSCRIPTIONS__ENABLED="false") as server, stream_on(server, "s") as stream:
        assert_problem(stream.put(headers=FENCE), 501, "fencing_unavailable")
        assert not stream.exists()
        stream.create()


# -- the write token


def test_wf05_a_valid_token_appends(session: Session) -> None:
    wake = session.subscription.claimed()
    assert session.write(wake, 0, '"a"').status_code == 200
    bearer = {"Authorization": f"Bearer {wake['write_token']}", **producer("agent", wake["generation"], 1)}
    assert session.stream.post('"b"', bearer).status_code == 200
    assert json.loads(session.stream.content()) == [0, 1, "a", "b"]


def test_wf06_a_token_for_other_streams_is_403(session: Session, stream_name: Callable[[], str]) -> None:
    other = Stream(session.http, stream_name(), "application/json").create(headers=FENCE)
    refused = session.write(session.subscription.claimed(), stream=other)
    assert_error(refused, 403, "TOKEN_OUT_OF_SCOPE")


@pytest.mark.parametrize("token", ["", "x", "wt1.", "wt1.e30.e30"])
def test_wf07_write_with_an_invalid_token_is_401(session: Session, token: str) -> None:
    before = session.stream.tail()
    assert_error(session.stream.post("[2]", {"Write-Token": token}), 401, "TOKEN_INVALID")
    assert session.stream.tail() == before


def test_wf07_a_changed_repeated_or_expired_token_is_401(session: Session, moving_server: Server) -> None:
    token = session.subscription.claimed()["write_token"]
    for wrong in (token[:-1], token.replace(".", ".A", 1), f"{token}, {token}"):
        assert_error(session.stream.post("[2]", {"Write-Token": wrong}), 401, "TOKEN_INVALID")
    moving_server.pass_time(3601)
    assert_error(session.stream.post("[2]", {"Write-Token": token}), 401, "TOKEN_INVALID")


def test_wf07_a_malformed_carrier_is_not_replaced_by_another_one(session: Session) -> None:
    wake = session.subscription.claimed()
    token = wake["write_token"]
    given = {**producer("agent", wake["generation"], 0), "Content-Type": "application/json"}
    for carriers in ([("Write-Token", "")], [("Write-Token", token), ("Write-Token", token)]):
        bearer = ("Authorization", f"Bearer {token}")
        refused = session.http.post(session.stream.path, content='"w"', headers=[*given.items(), *carriers, bearer])
        assert_error(refused, 401, "TOKEN_INVALID")
    assert json.loads(session.stream.content()) == [0, 1]


def test_wf08_a_token_is_refused_as_soon_as_there_is_a_successor(session: Session, moving_server: Server) -> None:
    first = session.subscription.claimed("one")
    moving_server.pass_time(LEASE_MS / 1000 + 1)
    second = session.subscription.claimed("two")
    assert_fenced(session.write(first), "sealed", generation=second["generation"], current_holder="two")
    assert session.write(second).status_code == 200


def test_wf09_the_asserted_class_without_a_token_is_401_on_every_stream(session: Session, json_stream: Stream) -> None:
    for stream in (session.stream, json_stream.create()):
        assert_error(stream.post("[2]", FENCE), 401, "TOKEN_INVALID")
        assert stream.post("[2]", {"Write-Fence": "no"}).status_code == 204


# -- fenced writes


def test_wf10_a_fenced_write_without_producer_headers_is_400(session: Session) -> None:
    token = session.subscription.claimed()["write_token"]
    assert_problem(session.stream.post("[2]", {"Write-Token": token}), 400, "invalid_producer")
    assert_problem(session.stream.close(headers={"Write-Token": token}), 400, "invalid_producer")


def test_wf11_the_epoch_is_the_generation(session: Session) -> None:
    wake = session.subscription.claimed()
    for epoch in (wake["generation"] - 1, wake["generation"] + 1):
        assert_fenced(session.write(wake, epoch=epoch), "epoch", generation=wake["generation"])


def test_wf12_write_of_a_former_claim_changes_nothing(session: Session, moving_server: Server) -> None:
    wake = session.subscription.claimed()
    session.write(wake, 0)
    moving_server.pass_time(LEASE_MS / 1000 + 1)
    session.subscription.claimed("two")
    before = session.stream.tail()
    assert session.write(wake, 1).status_code == 409
    credentials = {"Write-Token": wake["write_token"], **producer("agent", wake["generation"], 1)}
    for content in ("[3]", ""):
        assert_fenced(session.stream.close(content, credentials), "sealed")
    assert session.stream.tail() == before
    assert "stream-closed" not in session.stream.head().headers


def test_wf13_a_lapsed_lease_is_fenced(session: Session, moving_server: Server) -> None:
    wake = session.subscription.claimed()
    moving_server.pass_time(LEASE_MS / 1000 + 1)
    assert session.write(wake).json()["error"]["reason"] in {"marker", "sealed"}


# -- open writes


def test_wf14_an_open_write_needs_the_servers_authentication() -> None:
    with serve(DS_AUTH__TOKEN="secret-of-the-server") as server, stream_on(server, "s", "application/json") as stream:
        authorization = {"Authorization": "Bearer secret-of-the-server"}
        stream.create(headers=FENCE | authorization)
        refused = stream.post("[1]")
        assert_problem(refused, 401, "unauthorized")
        assert stream.post("[1]", authorization).status_code == 204


def test_wf15_a_token_that_proves_only_the_wake_is_403(session: Session, json_stream: Stream) -> None:
    bearer = {"Authorization": f"Bearer {session.subscription.claimed()['token']}"}
    assert_error(session.stream.post("[2]", bearer), 403, "TOKEN_OUT_OF_SCOPE")
    assert json_stream.create().post("[2]", bearer).status_code == 204, "other streams ignore the token"


def test_wf16_and_wf17_a_bound_producer_is_refused_without_the_token(session: Session) -> None:
    wake = session.subscription.claimed()
    session.write(wake, 0, '"a"')
    generation = wake["generation"]
    for open_write in (("agent", generation, 1), ("agent", generation + 1, 0), ("agent", generation, 0)):
        assert_fenced(session.stream.post('"a"', producer(*open_write)), "bound")
    assert session.write(wake, 0, '"a"').status_code == 204, "with the token it is a repeat"


def test_wf18_an_unbound_producer_writes_as_on_any_stream(session: Session) -> None:
    session.write(session.subscription.claimed())
    assert session.stream.post("[2]", producer("user", 0, 0)).status_code == 200
    assert session.stream.post("[2]", producer("user", 0, 0)).status_code == 204
    assert_problem(session.stream.post("[2]", producer("user", 0, 2)), 409, "sequence_gap")
    assert session.stream.post("[3]").status_code == 204


# -- the seal


@pytest.mark.parametrize("how", ["done", "release"])
def test_wf19_and_wf20_the_end_of_a_claim_seals_its_generation(session: Session, how: str) -> None:
    wake = session.subscription.claimed()
    written = session.write(wake).headers["stream-next-offset"]
    session.stream.append("[9]")
    if how == "done":
        session.done(wake)
    else:
        session.subscription.act("release", wake)
    assert_fenced(session.write(wake, 1), "sealed")
    head = session.stream.head().headers
    assert head["write-fence-sealed-generation"] == str(wake["generation"])
    assert head["write-fence-sealed-offset"] == written, "not the tail: an open write followed"


@pytest.mark.parametrize("how", ["done", "release"])
def test_wf19_the_seal_is_on_every_linked_stream(session: Session, how: str) -> None:
    name = session.stream.name.removesuffix("/s")
    others = [Stream(session.http, f"{name}/{n}", "application/json").create(headers=FENCE) for n in range(2)]
    plain = Stream(session.http, f"{name}/plain", "application/json").create()
    wake = session.subscription.claimed()
    for stream in others:
        assert session.write(wake, stream=stream).status_code == 200
    if how == "done":
        session.done(wake)
    else:
        session.subscription.act("release", wake)
    for stream in (session.stream, *others):
        assert_fenced(session.write(wake, 1, stream=stream), "sealed")
        assert stream.head().headers["write-fence-sealed-generation"] == str(wake["generation"])
    assert "write-fence-sealed-generation" not in plain.head().headers


def test_wf19_a_removed_link_is_sealed_and_the_others_are_not(session: Session, stream_name: Callable[[], str]) -> None:
    explicit = Stream(session.http, stream_name(), "application/json").create(headers=FENCE)
    links = f"{session.subscription.path}/streams"
    assert session.http.post(links, json={"streams": [explicit.name]}).status_code == 204
    wake = session.subscription.claimed()
    written = session.write(wake, stream=explicit).headers["stream-next-offset"]
    assert session.http.delete(f"{links}/{quote(explicit.name, safe='')}").status_code == 204
    assert_fenced(session.write(wake, 1, stream=explicit), "sealed")
    assert explicit.head().headers["write-fence-sealed-offset"] == written
    assert session.write(wake).status_code == 200


def test_wf20_a_class_that_never_wrote_is_sealed_at_the_tail(session: Session) -> None:
    assert "write-fence-sealed-generation" not in session.stream.head().headers
    session.done(session.subscription.claimed())
    assert session.stream.head().headers["write-fence-sealed-offset"] == session.stream.tail()


def test_wf21_a_successor_finds_the_seal_of_its_predecessor(session: Session, moving_server: Server) -> None:
    first = session.subscription.claimed()
    written = session.write(first).headers["stream-next-offset"]
    moving_server.pass_time(LEASE_MS / 1000 + 1)
    session.subscription.claimed("two")
    head = session.stream.head().headers
    assert head["write-fence-sealed-generation"] == str(first["generation"])
    assert head["write-fence-sealed-offset"] == written


def test_wf22_a_repeated_done_changes_nothing(session: Session) -> None:
    wake = session.subscription.claimed()
    session.write(wake)
    session.done(wake)
    sealed = session.stream.head().headers["write-fence-sealed-offset"]
    session.stream.append("[9]")
    assert session.done(wake).status_code == 409
    assert session.stream.head().headers["write-fence-sealed-offset"] == sealed


def test_wf23_a_new_subscription_of_the_same_id_starts_unsealed(session: Session) -> None:
    first = session.subscription.claimed()
    session.write(first)
    session.subscription.delete()
    assert_fenced(session.write(first, 1), "sealed")
    session.subscribe()
    session.stream.append("[2]")
    second = session.subscription.claimed()
    assert second["generation"] == first["generation"]
    assert_fenced(session.write(first, 1), "sealed")
    headers = {"Write-Token": second["write_token"], **producer("agent-2", second["generation"], 0)}
    assert session.stream.post('"w"', headers).status_code == 200


# -- what a refusal discloses


def test_wf24_and_wf25_refusal_tells_the_writer_to_stop(session: Session, moving_server: Server) -> None:
    first = session.subscription.claimed()
    moving_server.pass_time(LEASE_MS / 1000 + 1)
    second = session.subscription.claimed("worker-B")
    refused = session.write(first, 7)
    assert_fenced(refused, "sealed", generation=second["generation"], current_holder="worker-B")
    assert refused.headers["producer-epoch"] == str(second["generation"])
    assert refused.headers["producer-expected-seq"] == refused.headers["producer-received-seq"] == "7"


@pytest.mark.parametrize(
    "precedence",
    [{"Stream-Seq": "0"}, {"Producer-Seq": "7"}, {"Stream-Closed": "true"}],
    ids=str,
)
def test_fence_is_checked_before_any_other_refusal(session: Session, precedence: dict[str, str]) -> None:
    """Section 8 of the proposal: the fence comes before the closed stream, the producer and `Stream-Seq`."""
    wake = session.subscription.claimed()
    session.write(wake)
    session.stream.append("[2]", {"Stream-Seq": "5"})
    session.done(wake)
    session.stream.close()
    given = {"Write-Token": wake["write_token"], **producer("agent", wake["generation"], 1), **precedence}
    assert_fenced(session.stream.post("[3]", given), "sealed")


def test_wf26_refusal_of_a_credential_reveals_nothing(session: Session, stream_name: Callable[[], str]) -> None:
    wake = session.subscription.claimed()
    session.write(wake)
    other = Stream(session.http, stream_name(), "application/json").create(headers=FENCE)
    for stream, headers, status in (
        (session.stream, {"Write-Token": "x"}, 401),
        (session.stream, FENCE, 401),
        (session.stream, {"Authorization": f"Bearer {wake['token']}"}, 403),
        (other, {"Write-Token": wake["write_token"]}, 403),
    ):
        refused = stream.post("[2]", {**headers, **producer("agent", 1, 5)})
        assert refused.status_code == status
        assert set(refused.json()["error"]) == {"code", "message"}
        assert not [name for name in refused.headers if name.startswith(("producer-", "write-fence"))]


# -- delivery


def test_wf27_a_webhook_gets_the_token_heartbeats_and_seals(stream_name: Callable[[], str]) -> None:
    with (
        receive(otherwise=Reply()) as receiver,
        serve(DS_SUBSCRIPTIONS__ALLOW_LOCAL_WEBHOOKS="true") as server,
        stream_on(server, "agents/s", "application/json") as stream,
    ):
        stream.create(headers=FENCE)
        Subscription(stream.http, "hook").webhook(receiver.url, "agents/*")
        stream.append("[1]")
        wake = receiver.wait().body
        headers = {"Write-Token": wake["write_token"], **producer("agent", wake["generation"], 0)}
        assert stream.post('"w"', headers).status_code == 200

        def call_back(**body: object) -> httpx.Response:
            given = {"wake_id": wake["wake_id"], "generation": wake["generation"], **body}
            token = {"Authorization": f"Bearer {wake['callback_token']}"}
            return stream.http.post(wake["callback_url"], json=given, headers=token)

        beat = call_back().json()
        assert stream.post('"x"', headers | producer("agent", wake["generation"], 1)).status_code == 200
        refreshed = {"Write-Token": beat["write_token"], **producer("agent", wake["generation"], 2)}
        assert stream.post('"y"', refreshed).status_code == 200
        done = call_back(acks=[{"stream": "agents/s", "offset": stream.tail()}], done=True)
        assert "write_token" not in done.json()
        assert_fenced(stream.post('"z"', headers | producer("agent", wake["generation"], 3)), "sealed")


def test_wf28_a_pull_worker_outlives_its_lease_by_heartbeats(session: Session, moving_server: Server) -> None:
    wake = session.subscription.claimed()
    for seq in range(8):
        moving_server.pass_time(LEASE_MS / 1000 - 10)
        wake["write_token"] = session.subscription.act("ack", wake).json()["write_token"]
        assert session.write(wake, seq).status_code == 200
    session.done(wake)
    assert_fenced(session.write(wake, 8), "sealed")


# -- beyond the proposal


def test_subscription_without_fenced_streams_is_unchanged(moving_client: httpx.Client, stream_name: Any) -> None:
    root = stream_name()
    stream = Stream(moving_client, f"{root}/s", "application/json").create()
    Stream(moving_client, f"{root}-wakes", "application/json").create()
    subscription = Subscription(moving_client, root)
    subscription.pull(f"{root}-wakes", f"{root}/*", lease_ttl_ms=LEASE_MS)
    stream.append("[1]")
    wake = subscription.claimed()
    assert "write_token" not in wake
    assert "write_token" not in subscription.act("ack", wake).json()


@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_the_fence_its_bindings_and_its_seals_survive_kill_nine(tmp_path: Path, mode: str) -> None:
    arguments = ("--mode", mode, "--data-dir", str(tmp_path / "data"))
    with serve(arguments=arguments) as server, httpx.Client(base_url=server.url) as http:
        session = Session(http, "agents")
        first = session.subscription.claimed()
        session.write(first)
        session.subscription.act("release", first)
        second = session.subscription.claimed()
        assert session.write(second, 0).status_code == 200
        server.kill()
    with serve(arguments=arguments) as server, stream_on(server, "agents/s", "application/json") as stream:
        session.stream = stream
        assert stream.head().headers["write-fence-sealed-generation"] == str(first["generation"])
        assert_fenced(session.write(first, 1), "sealed")
        assert_fenced(stream.post('"a"', producer("agent", 9, 0)), "bound")
        assert session.write(second, 1).status_code == 200
        assert stream.delete().status_code == 204
        assert stream.create().post("[1]", producer("agent", 0, 0)).status_code == 200, "a new stream is not fenced"
