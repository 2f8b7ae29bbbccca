"""The commands that create, write, list and delete streams, against our server and the official Node server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.cli.shell import Shell, on_terminal
from tests.http_handlers import HandlerServer, QuietHandler
from tests.serving import Server, serve
from tests.waiting import wait_until


def test_a_stream_from_create_to_delete(any_shell: Shell) -> None:
    shell = any_shell
    assert shell.ok("create", "round/trip", "--ttl", "3600").startswith("created http")
    assert shell.ok("create", "round/trip", "--ttl", "3600").startswith("exists http")
    shell.ok("append", "round/trip", '{"n":1}', "[2,3]", '"four"')
    lines = b'{"n":5}\n\n  {"n": 6}  \n'
    offset = shell.ok("append", "round/trip", stdin=lines).strip()
    read = [json.loads(line) for line in shell.ok("read", "round/trip").splitlines()]
    assert read == [{"n": 1}, [2, 3], "four", {"n": 5}, {"n": 6}]
    reported = json.loads(shell.ok("head", "round/trip", "--json"))
    assert reported["stream-next-offset"] == offset
    assert reported["content-type"] == "application/json"
    assert shell.ok("read", "round/trip", "--from", offset) == ""
    shell.ok("close", "round/trip")
    assert json.loads(shell.ok("head", "round/trip", "--json"))["stream-closed"] == "true"
    assert "409" in shell.fails(4, "append", "round/trip", "1")
    assert "--yes" in shell.fails(2, "delete", "round/trip")
    shell.ok("delete", "round/trip", "--yes")
    assert "there is no stream" in shell.fails(3, "head", "round/trip")


def test_text_and_bytes_are_returned_unchanged(any_shell: Shell) -> None:
    shell = any_shell
    text = b"one\ntwo\r\n\n  three"
    shell.ok("create", "as/text", "--type", "text/plain")
    shell.ok("append", "as/text", stdin=text)
    assert shell.run("read", "as/text").stdout == text
    data = bytes(range(256)) * 40
    shell.ok("create", "as/bytes", "--type", "application/octet-stream")
    shell.ok("append", "as/bytes", "--raw", stdin=data)
    assert shell.run("read", "as/bytes").stdout == data


def test_append_creates_the_stream_on_request(any_shell: Shell) -> None:
    shell = any_shell
    assert "--create" in shell.fails(3, "append", "made/json", "1")
    assert "text/plain" in shell.fails(2, "append", "made/json", "--create", "not json")
    shell.fails(3, "head", "made/json")
    shell.ok("append", "made/json", "--create", "1", "2")
    shell.ok("append", "made/json", "--create", "3")
    assert shell.ok("read", "made/json").splitlines() == ["1", "2", "3"]
    shell.ok("append", "made/text", "--create", "--type", "text/plain", "hello")
    assert shell.ok("read", "made/text") == "hello"


def test_each_argument_after_the_stream_is_one_message(shell: Shell, ours: Server) -> None:
    shell.ok("append", "words/text", "--create", "--type", "text/plain", "hello", "world")
    headers = httpx.head(f"{ours.url}/v1/stream/words/text").headers
    assert headers["stream-next-position"] == "2"
    again = ("append", "words/text", "--producer", "p", "one", "two")
    assert shell.ok(*again) == shell.ok(*again)
    assert httpx.head(f"{ours.url}/v1/stream/words/text").headers["stream-next-position"] == "4"


def test_buckets_and_snapshots_from_creation_to_deletion(shell: Shell, tmp_path: Path) -> None:
    assert shell.ok("bucket", "create", "depot") == f"created {shell.url}/ds/depot\n"
    assert "depot" in shell.fails(4, "bucket", "create", "depot")
    assert shell.ok("bucket", "create", "depot", "--exist-ok").startswith("exists")
    shell.ok("append", "/ds/depot/stock", "--create", '{"n":1}')
    assert "depot  1 stream\n" in shell.ok("bucket", "ls")
    (tmp_path / "state.json").write_text('{"total":1}')
    at = shell.ok("snapshot", "publish", "/ds/depot/stock", str(tmp_path / "state.json")).strip()
    assert at == shell.ok("snapshot", "publish", "/ds/depot/stock", "-", "--offset", at, stdin=b'{"total":2}').strip()
    assert shell.ok("snapshot", "get", "/ds/depot/stock") == '{"total":2}'
    assert "depot" in shell.fails(4, "bucket", "delete", "depot")
    shell.ok("delete", "/ds/depot/stock", "--yes")
    shell.ok("bucket", "delete", "depot")


def test_subscriptions_from_creation_to_deletion(shell: Shell) -> None:
    assert "--webhook" in shell.fails(2, "subscription", "create", "jobs", "--pattern", "work/*")
    create = ("subscription", "create", "jobs", "--pattern", "work/*", "--wake-stream", "wakes", "--lease-ms", "5000")
    assert shell.ok(*create) == "created jobs\n"
    assert shell.ok(*create) == "exists jobs\n"
    shell.ok("append", "work/a", "--create", "1")
    shell.ok("subscription", "link", "jobs", "other")
    listed = shell.ok("subscription", "ls")
    assert "jobs  pull-wake  active  2 streams" in listed
    wait_until(lambda: "'wakes' does not exist" in shell.ok("subscription", "show", "jobs"))
    shown = shell.ok("subscription", "show", "jobs")
    assert "explicit  other" in shown
    assert "glob      work/a" in shown
    shell.ok("subscription", "unlink", "jobs", "other")
    assert json.loads(shell.ok("subscription", "show", "jobs", "--json"))["stream_count"] == 1
    shell.ok("subscription", "delete", "jobs")
    shell.fails(3, "subscription", "show", "jobs")


def test_messages_keep_every_byte(shell: Shell) -> None:
    shell.ok("create", "exact/one")
    odd = '{"id":9007199254740993,"b":1.0,"a":1,"a":2}'
    shell.ok("append", "exact/one", odd, '{\n "spread":\n [1,\n 2.50]}')
    assert shell.ok("read", "exact/one").splitlines() == [odd, '{"spread":[1,2.50]}']


def test_slow_input_is_appended_as_it_arrives(shell: Shell, ours: Server) -> None:
    shell.ok("create", "slow/one")
    writing = shell.start("append", "slow/one", stdin=subprocess.PIPE)
    assert writing.stdin is not None
    for number in range(3):
        writing.stdin.write(b"%d\n" % number)
        writing.stdin.flush()
        wait_until(
            lambda: httpx.get(ours.stream_url("slow/one"), params={"offset": "-1"}).json(),
            lambda found: found == list(range(number + 1)),  # noqa: B023 - used within this round
            what="a line waits for no other",
        )
    writing.communicate(timeout=60)
    assert writing.returncode == 0


def test_the_same_input_with_a_producer_is_stored_once(any_shell: Shell) -> None:
    shell = any_shell
    shell.ok("create", "once/one")
    lines = b"".join(b"%d\n" % number for number in range(250))
    run: Callable[..., str] = lambda **more: shell.ok(  # noqa: E731
        "append", "once/one", "--producer", "nightly", "--batch", "100", **more
    )
    # A run that was interrupted after the first two batches, then two complete runs.
    run(stdin=b"".join(b"%d\n" % number for number in range(200)))
    run(stdin=lines)
    run(stdin=lines)
    assert shell.run("read", "once/one").stdout == lines
    # A newer epoch fences older ones.
    shell.ok("append", "once/one", "--producer", "nightly", "--epoch", "1", "250")
    assert "a newer run with epoch 1 has taken over; pass a higher --epoch" in shell.fails(
        4, "append", "once/one", "--producer", "nightly", "0", stdin=b""
    )


def test_another_input_under_the_same_producer_is_an_error_not_a_loss(shell: Shell) -> None:
    shell.ok("create", "once/other")
    shell.ok("append", "once/other", "--producer", "p", "1")
    assert "has other content" in shell.fails(4, "append", "once/other", "--producer", "p", "2")


def test_fork(any_shell: Shell) -> None:
    shell = any_shell
    shell.ok("create", "forked/source")
    cut = shell.ok("append", "forked/source", "1").strip()
    shell.ok("append", "forked/source", "2")
    shell.ok("fork", "forked/source", "forked/whole")
    shell.ok("fork", "forked/source", "forked/part", "--offset", cut)
    assert shell.ok("read", "forked/whole").split() == ["1", "2"]
    assert shell.ok("read", "forked/part").split() == ["1"]


def test_streams_buckets_and_their_streams_are_listed(shell: Shell, ours: Server) -> None:
    for name in ("listed/b", "listed/a", "listed/gone"):
        shell.ok("create", name)
    shell.ok("delete", "listed/gone", "-y")
    assert shell.ok("ls", "listed/").split() == ["listed/a", "listed/b"]
    assert "application/json" in shell.ok("ls", "listed/", "-l")
    entries = [json.loads(line) for line in shell.ok("ls", "listed/", "--json").splitlines()]
    assert [entry["name"] for entry in entries] == ["listed/a", "listed/b"]
    httpx.put(f"{ours.url}/ds/cli-bucket")
    shell.ok("create", "/ds/cli-bucket/user-1")
    shell.ok("create", "/ds/cli-bucket/other")
    assert "/ds/cli-bucket" in shell.ok("ls", "/ds").split()
    assert shell.ok("ls", "/ds/cli-bucket").split() == ["/ds/cli-bucket/other", "/ds/cli-bucket/user-1"]
    assert shell.ok("ls", "/ds/cli-bucket/user").split() == ["/ds/cli-bucket/user-1"]


def test_streams_of_the_server_itself_are_listed_on_request(tmp_path: Path) -> None:
    with serve(DS_REGISTRY__ENABLED="true") as server:
        shell = Shell(server.url, tmp_path)
        shell.ok("create", "mine")
        assert shell.ok("ls").split() == ["mine"], "as in the stream browser"
        assert shell.ok("ls", "--all").split() == ["__registry__", "mine"]
        assert shell.ok("ls", "__").split() == ["__registry__"]


def test_a_stream_can_be_given_by_its_url(shell: Shell, ours: Server) -> None:
    elsewhere = Shell("http://127.0.0.1:1", shell.directory)
    elsewhere.ok("create", ours.stream_url("by/url"))
    elsewhere.ok("append", ours.stream_url("by/url"), "7")
    assert elsewhere.ok("read", ours.stream_url("by/url")) == "7\n"


@pytest.mark.parametrize(
    ("code", "arguments", "says"),
    [
        (1, ["ls", "--url", "http://127.0.0.1:1"], "check that a server is running there"),
        (2, ["ls", "--url", "localhost:4437"], "http://"),
        (2, ["create", "a//b"], "invalid_name"),
        (
            2,
            ["create", "x", "--ttl", "1", "--expires-at", "2030-01-01T00:00:00Z"],
            "--ttl cannot be combined with --expires-at",
        ),
        (2, ["read", "x", "--limit", "0"], "limit"),
        (2, ["read", "x", "--last", "1", "--from", "now"], "--from and --last"),
        (2, ["tail", "x", "-n", "1", "--resume", "f"], "--last and --resume"),
        (2, ["read", "plain", "--raw", "--pretty"], "--raw cannot be combined with --pretty"),
        (2, ["append", "x", "1", "--type", "text/plain"], "--create"),
        (2, ["read", "x", "--resume", "f", "--limit", "1"], "--resume cannot be combined with --limit"),
        (3, ["read", "no/such"], "(`headwater ls` lists the streams, `headwater create` creates one)"),
        (3, ["tail", "no/such"], "there is no stream"),
        (3, ["append", "no/such", "1"], "there is no stream"),
        (3, ["delete", "no/such", "--yes"], "stream_not_found"),
        (3, ["ls", "/ds/no-such-bucket"], "bucket_not_found"),
    ],
)
def test_error_is_one_line_and_an_exit_code(shell: Shell, code: int, arguments: list[str], says: str) -> None:
    assert says in shell.fails(code, *arguments)


def test_a_server_without_a_listing_cannot_be_listed(node: str, tmp_path: Path) -> None:
    assert "neither a stream listing nor a registry" in Shell(node, tmp_path).fails(3, "ls")


def test_terminal_shows_the_progress_of_an_append(shell: Shell) -> None:
    shell.ok("create", "shown/written")
    lines = b"".join(b"%d\n" % number for number in range(5000))
    _, shown = on_terminal(shell, "append", "shown/written", stdin=lines)
    assert "shown/written" in shown
    assert "kB" in shown


def test_control_characters_in_names_of_a_server_are_printed_as_escapes(tmp_path: Path) -> None:
    """An untrusted server can choose any names, in listings and in errors."""
    name = "x\x1b[2J\x9b\ny"

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            listed = {"streams": [{"stream_id": name}], "has_more": False}
            if "/streams" not in self.path:
                listed = {"status": 404, "code": "stream_not_found", "detail": f"No stream {name}."}
            body = json.dumps(listed, ensure_ascii=False).encode()
            self.send_response(200 if "/streams" in self.path else 404)
            self.send_header("Content-Type", "application/problem+json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with HandlerServer(Handler).running() as server:
        shell = Shell(server.url, tmp_path)
        assert shell.ok("ls", "/ds/some") == "/ds/some/x\\x1b[2J\\x9b\\ny\n"
        assert json.loads(shell.ok("ls", "/ds/some", "--json"))["name"] == f"/ds/some/{name}"
        assert "\x9b" not in shell.ok("ls", "/ds/some", "--json")
        refused = shell.run("ls", "/ds")
        assert refused.returncode == 3
        assert b"\x1b" not in refused.stderr
        assert b"\\x1b[2J" in refused.stderr
