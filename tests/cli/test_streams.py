"""The stream commands, as run from a shell, against our server and the official Node server."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest
from bench.servers import official_node

from headwater.cli import main
from headwater.cli.reading import since_time
from tests.ports import free_port
from tests.serving import Server, serve, server_environment
from tests.waiting import wait_until

OURS = "headwater"
NODE = "node"


@dataclass(frozen=True, slots=True)
class Done:
    returncode: int
    stdout: bytes
    stderr: bytes


class Shell:
    """Runs the command against one server, in one directory."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory

    def start(self, *arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """Start the command as a separate process, for tests that do something while it runs."""
        return subprocess.Popen(
            [sys.executable, "-m", "headwater", *arguments],
            cwd=self.directory,
            env=server_environment(DS_URL=self.url),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *arguments: str, stdin: bytes = b"") -> Done:
        """Run the command in this process, because starting Python takes longer than most commands."""
        given, out, said = (io.TextIOWrapper(io.BytesIO(data), write_through=True) for data in (stdin, b"", b""))
        with (
            chdir(self.directory),
            patch.dict(os.environ, {"DS_URL": self.url}),
            patch.multiple(sys, stdin=given, stdout=out, stderr=said),
            pytest.raises(SystemExit) as ended,
        ):
            main(list(arguments))
        assert isinstance(ended.value.code, int)
        return Done(ended.value.code, out.buffer.getvalue(), said.buffer.getvalue())

    def ok(self, *arguments: str, stdin: bytes = b"") -> str:
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def fails(self, code: int, *arguments: str, stdin: bytes = b"") -> str:
        """Run a command that must fail with this code; return its line on stderr."""
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == code, done.stderr.decode()
        [line] = done.stderr.decode().splitlines()
        assert line.startswith("headwater: ")
        return line


@pytest.fixture(scope="module")
def ours() -> Iterator[Server]:
    with serve(DS_REGISTRY__ENABLED="true", DS_LIMITS__MAX_CHUNK_BYTES="4000") as server:
        yield server


@pytest.fixture(scope="module")
def node() -> Iterator[str]:
    with official_node() as running:
        yield running.url


@pytest.fixture
def shell(ours: Server, tmp_path: Path) -> Shell:
    return Shell(ours.url, tmp_path)


@pytest.fixture(params=[OURS, NODE])
def any_shell(request: pytest.FixtureRequest, tmp_path: Path) -> Shell:
    """A shell for each of both servers."""
    if request.param == OURS:
        return Shell(request.getfixturevalue("ours").url, tmp_path)
    return Shell(request.getfixturevalue("node"), tmp_path)


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


def test_a_long_stream_is_read_page_by_page_and_to_a_limit(shell: Shell) -> None:
    shell.ok("create", "long/one")
    lines = b"".join(b'{"n":%d}\n' % number for number in range(3000))
    shell.ok("append", "long/one", "--batch", "700", stdin=lines)
    assert shell.run("read", "long/one").stdout == lines
    assert shell.ok("read", "long/one", "-n", "2").splitlines() == ['{"n":0}', '{"n":1}']
    assert shell.ok("read", "long/one", "--raw").startswith('[{"n":0}')


def test_the_last_messages_are_read_or_followed(any_shell: Shell) -> None:
    shell = any_shell
    shell.ok("create", "last/one")
    shell.ok("append", "last/one", stdin=b"".join(b'{"n":%d}\n' % n for n in range(20)))
    newest = ['{"n":18}', '{"n":19}']
    assert shell.ok("read", "last/one", "--last", "2").splitlines() == newest
    assert shell.ok("tail", "last/one", "-n", "2", "--limit", "2").splitlines() == newest
    assert shell.ok("tail", "last/one", "--last", "100", "--limit", "20").splitlines()[-2:] == newest
    with shell.start("tail", "last/one", "-n", "1") as tail:
        assert tail.stdout is not None
        assert tail.stdout.readline() == b'{"n":19}\n'
        shell.ok("append", "last/one", '{"n":20}')
        assert tail.stdout.readline() == b'{"n":20}\n'
        shell.ok("close", "last/one")
        assert tail.wait(timeout=60) == 0


def test_the_last_messages_of_text_keep_their_boundaries(shell: Shell) -> None:
    shell.ok("create", "last/text", "--type", "text/plain")
    shell.ok("append", "last/text", "one", "two", "three")
    assert shell.ok("read", "last/text", "--last", "2") == "twothree"


def test_lines_and_limit_keep_the_messages_of_text_apart(shell: Shell) -> None:
    shell.ok("create", "lines/text", "--type", "text/plain")
    shell.ok("append", "lines/text", "one", "two\r\n", "three")
    assert shell.run("read", "lines/text").stdout == b"onetwo\r\nthree", "a pipe gets the bytes as they are"
    assert shell.run("read", "lines/text", "--lines").stdout == b"one\ntwo\r\nthree\n"
    assert shell.run("read", "lines/text", "--lines", "--last", "2").stdout == b"two\r\nthree\n"
    assert shell.run("read", "lines/text", "--limit", "1").stdout == b"one", "a message, not all that arrived at once"
    assert shell.run("tail", "lines/text", "--from", "-1", "--limit", "2").stdout == b"onetwo\r\n"
    with shell.start("tail", "lines/text", "-n", "1", "--lines") as tail:
        assert tail.stdout is not None
        assert tail.stdout.readline() == b"three\n"
        shell.ok("append", "lines/text", "four", "five\rsix")
        assert tail.stdout.readline() == b"four\n"
        assert tail.stdout.readline() == b"five\rsix\n"
        shell.ok("close", "lines/text")
        assert tail.wait(timeout=60) == 0
    assert shell.run("tail", "lines/text", "--from", "-1", "--lines").stdout.count(b"\n") == 5, "it ends: it is closed"
    assert "--lines" in shell.fails(2, "read", "lines/text", "--raw", "--lines")
    shell.ok("append", "lines/bytes", "--create", "--type", "application/octet-stream", "a", "b")
    assert shell.run("read", "lines/bytes").stdout == b"ab"
    assert shell.run("read", "lines/bytes", "--lines").stdout == b"a\nb\n"


def test_messages_of_text_are_lines_on_a_terminal(shell: Shell) -> None:
    shell.ok("append", "lines/terminal", "--create", "--type", "text/plain", "one", "two")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "headwater", "read", "lines/terminal"]
    subprocess.run(command, env=server_environment(DS_URL=shell.url), stdout=theirs, check=True, timeout=120)
    assert os.read(ours, 1000) == b"one\r\ntwo\r\n"
    os.close(ours)
    os.close(theirs)


def test_messages_since_a_time(shell: Shell) -> None:
    shell.ok("append", "since/one", "--create", '{"n":1}')
    assert shell.ok("read", "since/one", "--since", "1h").splitlines() == ['{"n":1}']
    assert shell.ok("read", "since/one", "--since", "2100-01-01") == ""
    assert shell.ok("tail", "since/one", "--since", "2020-01-01T00:00:00Z", "--limit", "1") == '{"n":1}\n'
    assert "is not a time" in shell.fails(2, "read", "since/one", "--since", "soon")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", "2026-03-01T11:58:30.000Z"),
        ("10m", "2026-03-01T11:50:00.000Z"),
        ("2d", "2026-02-27T12:00:00.000Z"),
        ("09:30", "2026-03-01T09:30:00.000Z"),
        ("2026-02-01", "2026-02-01T00:00:00.000Z"),
        ("2026-02-01T01:00:00+01:00", "2026-02-01T00:00:00.000Z"),
    ],
)
def test_times_are_absolute_or_relative(text: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    assert since_time(text, datetime(2026, 3, 1, 12, tzinfo=UTC)) == expected


def test_pretty_indents_messages(shell: Shell) -> None:
    shell.ok("append", "pretty/one", '{"a":{"b":1}}', "--create")
    assert shell.ok("read", "pretty/one", "--pretty") == '{\n  "a": {\n    "b": 1\n  }\n}\n'


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


def test_resume_continues_where_the_last_run_stopped(any_shell: Shell) -> None:
    shell = any_shell
    shell.ok("create", "resumed/one")
    shell.ok("append", "resumed/one", "1", "2")
    assert shell.ok("read", "resumed/one", "--resume", "place.json").split() == ["1", "2"]
    assert shell.ok("read", "resumed/one", "--resume", "place.json") == ""
    shell.ok("append", "resumed/one", "3")
    assert shell.ok("read", "resumed/one", "--resume", "place.json").split() == ["3"]
    shell.ok("append", "resumed/one", "4")
    shell.ok("close", "resumed/one")
    assert shell.ok("tail", "resumed/one", "--resume", "place.json").split() == ["4"]
    assert "belongs to" in shell.fails(2, "read", "resumed/two", "--resume", "place.json")
    (shell.directory / "broken.json").write_text("{")
    assert "was not written by this command" in shell.fails(2, "read", "resumed/one", "--resume", "broken.json")


@pytest.mark.parametrize("live", ["auto", "sse", "long-poll"])
def test_tail_follows_until_the_stream_is_closed(any_shell: Shell, live: str) -> None:
    shell = any_shell
    name = f"tailed/{live}"
    shell.ok("create", name)
    shell.ok("append", name, '"before"')
    following = shell.start("tail", name, "--from", "-1", "--live", live)
    assert following.stdout is not None
    assert following.stdout.readline() == b'"before"\n'
    shell.ok("append", name, '"first"', '"second"')
    assert [following.stdout.readline() for _ in range(2)] == [b'"first"\n', b'"second"\n']
    shell.ok("append", name, '"last"', "--close")
    rest, said = following.communicate(timeout=60)
    assert rest == b'"last"\n'
    assert following.returncode == 0, said


def test_tail_follows_several_streams_over_one_connection_until_all_are_closed(shell: Shell, ours: Server) -> None:
    shell.ok("create", "several/json")
    shell.ok("create", "several/text", "--type", "text/plain")
    shell.ok("create", "several/bytes", "--type", "application/octet-stream")
    octets = {"Content-Type": "application/octet-stream"}
    httpx.post(ours.stream_url("several/bytes"), content=b"\xff", headers=octets).raise_for_status()
    following = shell.start("tail", "several/json", ours.stream_url("several/text"), "several/bytes", "--from", "-1")
    assert following.stdout is not None
    assert json.loads(following.stdout.readline()) == {"stream": "several/bytes", "base64": "/w=="}
    httpx.post(ours.stream_url("several/json"), json={"n": 1}).raise_for_status()
    assert following.stdout.readline() == b'{"stream":"several/json","message":{"n":1}}\n'
    shell.ok("append", "several/text", "two\nlines", "--close")
    shell.ok("close", "several/json")
    shell.ok("close", "several/bytes")
    rest, said = following.communicate(timeout=60)
    assert json.loads(rest)["message"].startswith("two\nlines")
    assert following.returncode == 0, said


def test_tail_of_a_prefix_includes_streams_that_are_created_later(shell: Shell) -> None:
    shell.ok("create", "below/old")
    shell.ok("append", "below/old", "1", "2")
    assert shell.ok("tail", "--prefix", "below/", "--from", "-1", "--limit", "1") == (
        '{"stream":"below/old","message":1}\n'
    )
    following = shell.start("tail", "--prefix", "below/", "--from", "-1", "--limit", "3")
    assert following.stdout is not None
    assert [json.loads(following.stdout.readline())["message"] for _ in range(2)] == [1, 2]
    shell.ok("create", "below/new")
    shell.ok("append", "below/new", "3")
    rest, said = following.communicate(timeout=60)
    assert rest == b'{"stream":"below/new","message":3}\n'
    assert following.returncode == 0, said


def test_tail_of_several_streams_rejects_unsupported_options(any_shell: Shell, ours: Server) -> None:
    shell = any_shell
    assert "name a stream, or use --prefix" in shell.fails(2, "tail")
    assert "--last, --raw: only with a single stream" in shell.fails(2, "tail", "a", "b", "-n", "1", "--raw")
    assert "--from: '5_5'" in shell.fails(2, "tail", "a", "b", "--from", "5_5")
    assert "there is no stream" in shell.fails(3, "tail", "several/none", "several/nothing")
    assert "all streams must be on one server" in shell.fails(
        2, "tail", "a", "http://127.0.0.1:9/v1/stream/b", "--from", "-1"
    )
    if shell.url != ours.url:
        assert "cannot follow several streams" in shell.fails(1, "tail", "--prefix", "x/")


def test_ctrl_c_ends_a_tail_with_130_and_no_traceback(shell: Shell) -> None:
    shell.ok("create", "tailed/interrupted")
    shell.ok("append", "tailed/interrupted", "1")
    following = shell.start("tail", "tailed/interrupted", "--from", "-1")
    assert following.stdout is not None
    assert following.stdout.readline() == b"1\n"
    following.send_signal(signal.SIGINT)
    _, said = following.communicate(timeout=60)
    assert following.returncode == 130
    assert b"Traceback" not in said


def test_tail_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    port = free_port()
    with serve(directory=tmp_path, port=port, DS_STORAGE__MODE="file-durable") as first:
        shell = Shell(first.url, tmp_path)
        shell.ok("create", "tailed/restart")
        shell.ok("append", "tailed/restart", "1")
        following = shell.start("tail", "tailed/restart", "--from", "-1")
        assert following.stdout is not None
        assert following.stdout.readline() == b"1\n"
        first.kill()
    with serve(directory=tmp_path, port=port, DS_STORAGE__MODE="file-durable"):
        shell.ok("append", "tailed/restart", "2", "--close")
        rest, _ = following.communicate(timeout=60)
        assert rest == b"2\n", "nothing is lost and nothing doubled"
        assert following.returncode == 0


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
    assert "fenced by epoch 1" in shell.fails(4, "append", "once/one", "--producer", "nightly", "0", stdin=b"")


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


def test_closed_output_pipe_is_not_an_error(shell: Shell) -> None:
    shell.ok("create", "piped/one")
    shell.ok("append", "piped/one", stdin=b"".join(b'"%d %s"\n' % (n, b"x" * 200) for n in range(5000)))
    command = f"{sys.executable} -m headwater read piped/one | head -n 1; echo ${{PIPESTATUS[0]}}"
    environment = server_environment(DS_URL=shell.url)
    done = subprocess.run(
        ["bash", "-c", command], cwd=shell.directory, env=environment, capture_output=True, timeout=60
    )
    assert done.stdout.splitlines()[1] == b"0"
    assert done.stderr == b""


def on_terminal(shell: Shell, *arguments: str, stdin: bytes = b"") -> tuple[bytes, str]:
    """Run a command whose stderr is a terminal; return its stdout and what the terminal shows."""
    leader, follower = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "headwater", *arguments],
        cwd=shell.directory,
        env=server_environment(DS_URL=shell.url, TERM="xterm"),
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=follower,
        timeout=60,
    )
    os.close(follower)
    shown = os.read(leader, 65536).decode()
    os.close(leader)
    assert done.returncode == 0, shown
    return done.stdout, shown


def test_terminal_shows_the_progress_of_a_read(shell: Shell) -> None:
    shell.ok("create", "shown/one")
    shell.ok("append", "shown/one", stdin=b"".join(b"%d\n" % number for number in range(5000)))
    printed, shown = on_terminal(shell, "read", "shown/one")
    assert len(printed.splitlines()) == 5000
    assert "shown/one" in shown
    assert "kB" in shown


def test_terminal_shows_the_progress_of_an_append(shell: Shell) -> None:
    shell.ok("create", "shown/written")
    lines = b"".join(b"%d\n" % number for number in range(5000))
    _, shown = on_terminal(shell, "append", "shown/written", stdin=lines)
    assert "shown/written" in shown
    assert "kB" in shown


def test_a_shell_completes_the_commands(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headwater"],
        cwd=tmp_path,
        env=server_environment(_HEADWATER_COMPLETE="complete_bash", COMP_WORDS="headwater cl", COMP_CWORD="1"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["close", "cluster"]


def test_control_characters_in_names_of_a_server_are_printed_as_escapes(tmp_path: Path) -> None:
    """An untrusted server can choose any names, in listings and in errors."""
    import json
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    name = "x\x1b[2J\x9b\ny"

    class Handler(BaseHTTPRequestHandler):
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

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        shell = Shell(f"http://127.0.0.1:{server.server_address[1]}", tmp_path)
        assert shell.ok("ls", "/ds/some") == "/ds/some/x\\x1b[2J\\x9b\\ny\n"
        assert json.loads(shell.ok("ls", "/ds/some", "--json"))["name"] == f"/ds/some/{name}"
        assert "\x9b" not in shell.ok("ls", "/ds/some", "--json")
        refused = shell.run("ls", "/ds")
        assert refused.returncode == 3
        assert b"\x1b" not in refused.stderr
        assert b"\\x1b[2J" in refused.stderr
    finally:
        server.shutdown()
        server.server_close()
