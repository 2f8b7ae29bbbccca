"""`read` and `tail`, as run from a shell, against our server and the official Node server."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from headwater.cli.reading import since_time
from tests.cli.shell import Shell, on_terminal
from tests.ports import free_port
from tests.serving import Server, serve, server_environment


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


def test_terminal_shows_the_progress_of_a_read(shell: Shell) -> None:
    shell.ok("create", "shown/one")
    shell.ok("append", "shown/one", stdin=b"".join(b"%d\n" % number for number in range(5000)))
    printed, shown = on_terminal(shell, "read", "shown/one")
    assert len(printed.splitlines()) == 5000
    assert "shown/one" in shown
    assert "kB" in shown
