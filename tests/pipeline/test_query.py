"""`headwater query`, `fold` and `archive` from the command line: SQL over streams, archives, snapshots and states."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headwater.cli import main
from headwater.pipeline.table_calls import TableCall, rewritten
from headwater.spark.query_errors import error_sentence
from tests.pipeline.buckets import Bucket
from tests.serving import Server
from tests.spark.streams import Streams


@pytest.mark.parametrize(
    ("text", "result", "calls"),
    [
        ("SELECT * FROM stream('a/1')", "SELECT * FROM v0", [("stream", "a/1")]),
        (
            "select * from STREAM( 'a' , 'id long' ) x join archive('/l') y",
            "select * from v0 x join v1 y",
            [("stream", "a", "id long"), ("archive", "/l")],
        ),
        ("SELECT 'stream(''a'')', \"state('b')\", `snapshot('c')`", None, []),
        ("SELECT 1 -- stream('a')\n/* archive('b') */", None, []),
        ("SELECT upstream('a'), stream(a), stream('a' || 'b') FROM t", None, []),
        (r"SELECT * FROM state('it''s \'so\'')", "SELECT * FROM v0", [("state", "it's 'so'")]),
        ("FROM streams('a'), states('/ds/b/')", "FROM v0, v1", [("streams", "a"), ("states", "/ds/b/")]),
    ],
)  # fmt: skip
def test_only_table_functions_with_string_arguments_are_replaced(
    text: str, result: str | None, calls: list[tuple[str, ...]]
) -> None:
    seen: list[TableCall] = []

    def view(call: TableCall) -> str:
        seen.append(call)
        return f"v{len(seen) - 1}"

    assert rewritten(text, view) == (text if result is None else result)
    assert seen == [TableCall(function, tuple(arguments)) for function, *arguments in calls]


@pytest.mark.parametrize(
    ("spark_says", "we_say"),
    [
        (
            "\n[PARSE_SYNTAX_ERROR] Syntax error at 'SELEKT'.\n\n== SQL ==\nSELEKT 1",
            "[PARSE_SYNTAX_ERROR] Syntax error at",
        ),
        (
            "[STREAM_FAILED] …\nTraceback:\n  x\nheadwater.spark.errors.DataGoneError: stream 'a': gone.\n\n\tat org…",
            "stream 'a'",
        ),
    ],
)
def test_one_line_of_a_spark_error_is_printed(spark_says: str, we_say: str) -> None:
    said = error_sentence(RuntimeError(spark_says))
    assert said.startswith(we_say)
    assert "\n" not in said


class Shell:
    """The command line, in this process and with this process's Spark."""

    def __init__(self, server: Server, output: pytest.CaptureFixture[str]) -> None:
        self._url = server.url
        self._output = output
        self.said = ""

    def __call__(self, *arguments: str, code: int = 0, remote: bool = True) -> str:
        self._output.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*arguments, *(("--url", self._url) if remote else ())])
        captured = self._output.readouterr()
        self.said = captured.err
        assert ended.value.code == code, captured.err
        return captured.out


def test_sql_over_streams_lakes_snapshots_and_states(
    spark: SparkSession, server: Server, bucket: Bucket, streams: Streams, tmp_path: Path,
    stream_name: Callable[[], str], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shell = Shell(server, capsys)
    orders = streams.filled(stream_name(), [{"id": n, "total": n * 1.5} for n in range(10)])
    events = [{"type": "chunk", "key": f"m{n % 2}", "operation": "append", "value": f"{n}"} for n in range(6)]
    for name in ("chat-1", "chat-2"):
        bucket.filled(name, events)
    lake, root = str(tmp_path / "lake"), f"/ds/{bucket.name}"

    shell("archive", "run", "--lake", lake, "--bucket", bucket.name, "--shards", "2", "--once", "--progress")
    assert "archive: batch 0, 12 messages" in shell.said
    shell("fold", "chat-1", "--bucket", bucket.name, "--once", "--checkpoints", str(tmp_path / "places"))
    bucket.append("chat-1", [{"type": "chunk", "key": "m0", "operation": "append", "value": "!"}])

    text = f"""
        SELECT a.stream, s.value AS state, count(*) AS archived, any_value(p.offset) AS folded,
               (SELECT max(total) FROM stream('{orders}', 'id long, total double')) AS most
        FROM archive('{lake}') a JOIN state('{root}/chat-1') s USING (stream)
        JOIN snapshot('{root}/chat-1') p USING (stream)
        WHERE s.key = 'm0' GROUP BY a.stream, s.value
    """
    assert [json.loads(line) for line in shell("query", text, "--format", "json").splitlines()] == [
        {"stream": "chat-1", "state": '"024!"', "archived": 6, "folded": bucket.snapshot_offset("chat-1"), "most": 13.5}
    ]
    text = f"SELECT stream, position, value FROM streams('{root}/chat-') ORDER BY ALL LIMIT 2"
    assert shell("query", text, "--format", "csv").splitlines() == [
        "stream,position,value",
        'chat-1,6,"{""type"":""chunk"",""key"":""m0"",""operation"":""append"",""value"":""!""}"',
        'chat-2,0,"{""type"":""chunk"",""key"":""m0"",""operation"":""append"",""value"":""0""}"',
    ]
    rows = shell("query", f"SELECT stream, key, value FROM states('{root}/') ORDER BY ALL", "--limit", "1")
    assert rows.split() == ["stream", "key", "value", "chat-1", "m0", '"024!"']
    assert "only the first 1 rows" in shell.said

    shown = shell("archive", "show", lake, remote=False)
    assert "2 streams, 12 rows" in shown
    assert bucket.tail("chat-2") in shown
    assert json.loads(shell("archive", "show", lake, "--json", remote=False).splitlines()[1]) == {
        "stream": "chat-2", "offset": bucket.tail("chat-2"), "messages": 6,
    }  # fmt: skip
    assert "compacted 0 files into 0" in shell("archive", "compact", lake, remote=False)

    shell("query", "SELECT * FROM stream('no-such-stream')", code=3)
    assert "there is no stream" in shell.said
    shell("query", "SELEKT 1", code=2)
    assert "SELEKT" in shell.said
    shell("query", f"FROM archive('{tmp_path}')", code=1)
    assert "is not an archive" in shell.said
    shell("fold", "chat-1", "--once", code=2)
    assert "only streams of a bucket" in shell.said
