"""`headwater query`: SQL over streams, archives, snapshots and states, printed as a table, JSON lines or CSV."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.output import quiet_broken_pipe
from headwater.cli.remote import DEFAULT_URL, MISSING, CaFile, Token, Url, connected
from headwater.cli.run_job import Master, stream_root
from headwater.printable import printable

TABLE_ROWS: Final = 1000
"""The most rows of a printed table without --limit."""
_FIRST_WORD: Final = re.compile(r"(?:\s|\(|--[^\n]*(?:\n|$)|/\*.*?\*/)*(\w*)", re.DOTALL)
_STATEMENT_WORDS: Final = """
    add alter analyze begin cache call clear comment create declare delete desc describe drop execute
    explain from insert list load map merge msck reduce refresh repair replace reset select set show
    table truncate uncache update use values with
"""
_STATEMENTS: Final = frozenset(_STATEMENT_WORDS.split())
"""The words that a statement of Spark SQL can begin with."""


class QueryEngine(StrEnum):
    AUTO = "auto"
    SPARK = "spark"


class Style(StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def query(
    text: Annotated[str, typer.Argument(metavar="SQL", help="For example: SELECT count(*) FROM stream('chat/1')")],
    style: Annotated[Style, typer.Option("--format", help="How to print the rows.")] = Style.TABLE,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, metavar="N", help="Print at most N rows; 0 prints all.")
    ] = 0,
    engine: Annotated[
        QueryEngine, typer.Option("--engine", help="auto runs small queries over single streams without Spark.")
    ] = QueryEngine.AUTO,
    master: Master = "local[2]",
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Run SQL over stream('name'), streams('prefix'), archive('lake'), snapshot('name') and state('name').

    Names are as in other commands: chat/1 is a stream of /v1/stream/, /ds/bucket/chat-1 a stream of a bucket. The
    second argument of stream() is a schema for the fields of JSON messages: stream('orders', 'id long, total double').
    """
    _check_first_word(text)
    if engine is QueryEngine.AUTO and _run_without_spark(text, style, limit, url, token, ca_file):
        return
    from headwater.pipeline.job import JobEnvironment
    from headwater.pipeline.session import SparkMissingError, spark_session
    from headwater.pipeline.stderr_lines import tidy_stderr

    if sys.stderr.isatty():
        typer.echo("headwater: starting Spark, which takes several seconds", err=True)
    environment = JobEnvironment(stream_root(url), "", token, ca_file=str(ca_file or ""))
    try:
        with quiet_broken_pipe(), tidy_stderr(on_terminal=True), spark_session("headwater query", master) as spark:
            from headwater.pipeline.query import QueryViews

            try:
                rows = QueryViews(spark, environment).sql(text)
                most = _most(style, limit)
                chosen = rows.limit(most) if most else rows
                _print(chosen.columns, chosen.toLocalIterator(), style, limit)
            except Exception as error:
                raise _failure(error) from None
    except SparkMissingError as error:
        raise CommandError(str(error)) from None


def _check_first_word(text: str) -> None:
    """Report a misspelled or missing statement at once: Spark would take several seconds to start first."""
    found = _FIRST_WORD.match(text)
    word = found[1] if found is not None else ""
    if not word:
        raise CommandError("the query is empty; for example: SELECT count(*) FROM stream('chat/1')", USAGE)
    if word.lower() not in _STATEMENTS:
        near = get_close_matches(word.lower(), _STATEMENTS, n=1)
        hint = f"did you mean {near[0].upper()}?" if near else "most begin with SELECT, FROM or WITH"
        raise CommandError(f"{printable(word)!r} does not begin an SQL statement; {hint}", USAGE)


def _failure(error: Exception) -> Exception:
    """The error as one line, if it is an error of the query or of the server."""
    from pyspark.errors import PySparkException

    from headwater.pipeline.archive.errors import ArchiveError
    from headwater.pipeline.query import QueryError
    from headwater.spark.errors import HeadwaterError, StreamMissingError
    from headwater.spark.query_errors import error_sentence

    if isinstance(error, StreamMissingError):
        return CommandError(str(error).split(" It was never")[0], MISSING)
    if isinstance(error, QueryError):
        return CommandError(str(error), USAGE)
    if isinstance(error, ArchiveError | HeadwaterError):
        return CommandError(str(error))
    if isinstance(error, PySparkException):
        return CommandError(error_sentence(error), USAGE)
    return error


def _run_without_spark(text: str, style: Style, limit: int, url: str, token: str, ca_file: Path | None) -> bool:
    """Run a small query without Spark and print its rows. False if the query needs Spark."""
    from headwater.pipeline.quick_query import NotSimpleError, answer

    with quiet_broken_pipe(), connected(url, token, ca_file) as client:
        try:
            found = answer(text, client, _most(style, limit))
        except NotSimpleError:
            return False
        _print(found.columns, iter(found.rows), style, limit)
    return True


def _most(style: Style, limit: int) -> int:
    """Number of rows to fetch, 0 for all. A table fetches one more than it prints, to know whether there are more."""
    if style is Style.TABLE:
        return (limit or TABLE_ROWS) + 1
    return limit


def _print(columns: list[str], rows: Iterator[Sequence[Any]], style: Style, limit: int) -> None:
    match style:
        case Style.JSON:
            for row in rows:
                line = json.dumps(_record(columns, row), ensure_ascii=False, default=_cell)
                sys.stdout.write(f"{line}\n")
        case Style.CSV:
            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerow(columns)
            for row in rows:
                writer.writerow([_cell(value) for value in row])
        case Style.TABLE:
            _print_table(columns, list(rows), limit or TABLE_ROWS)
    sys.stdout.flush()


def _record(columns: list[str], row: Sequence[Any]) -> dict[str, Any]:
    as_dict = getattr(row, "asDict", None)  # a row of Spark may contain rows
    return as_dict(recursive=True) if as_dict is not None else dict(zip(columns, row, strict=True))


def _print_table(columns: list[str], rows: list[Sequence[Any]], most: int) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=1000)  # grep needs whole lines
    table = Table(*(escape(printable(column)) for column in columns), box=None, pad_edge=False, header_style="bold")
    for row in rows[:most]:
        table.add_row(*(Text(printable(_cell(value))) for value in row))
    console.print(table)
    if len(rows) > most:
        sys.stderr.write(f"headwater: showing only the first {most} rows; use --limit, or --format json for all\n")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "backslashreplace")
    return str(value).lower() if isinstance(value, bool) else str(value)
