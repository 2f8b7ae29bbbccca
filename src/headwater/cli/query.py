"""`headwater query`: Spark SQL over streams, archives, snapshots and states, printed as a table, JSON lines or CSV."""

from __future__ import annotations

import csv
import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.output import readers_may_leave
from headwater.cli.remote import DEFAULT_URL, MISSING, CaFile, Token, Url
from headwater.cli.running import Master, stream_root
from headwater.printable import printable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TABLE_ROWS: Final = 1000
"""Most rows of a printed table without --limit."""


class Style(StrEnum):
    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def query(
    text: Annotated[str, typer.Argument(metavar="SQL", help="Such as: SELECT count(*) FROM stream('chat/1')")],
    style: Annotated[Style, typer.Option("--format", help="How to print the rows.")] = Style.TABLE,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, metavar="N", help="Print N rows at most; 0 is all.")
    ] = 0,
    master: Master = "local[2]",
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Run Spark SQL over stream('name'), streams('prefix'), archive('lake'), snapshot('name') and state('name').

    Names are as in other commands: chat/1 is a stream of /v1/stream/, /ds/bucket/chat-1 one of a bucket. stream() takes
    a schema for the fields of JSON messages as its second text: stream('orders', 'id long, total double').
    """
    from headwater.pipeline.job import JobEnvironment
    from headwater.pipeline.session import SparkMissingError, spark_session

    environment = JobEnvironment(stream_root(url), "", token, ca_file=str(ca_file or ""))
    try:
        with readers_may_leave(), spark_session("headwater query", master) as spark:
            from headwater.pipeline.query import QueryViews

            try:
                _print(QueryViews(spark, environment).sql(text), style, limit)
            except Exception as error:
                raise _failure(error) from None
    except SparkMissingError as error:
        raise CommandError(str(error)) from None


def _failure(error: Exception) -> Exception:
    """The error as one line, for errors of the query or of the server."""
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


def _print(rows: DataFrame, style: Style, limit: int) -> None:
    most = limit or (TABLE_ROWS if style is Style.TABLE else 0)
    chosen = rows.limit(most + (style is Style.TABLE)) if most else rows
    match style:
        case Style.JSON:
            for row in chosen.toLocalIterator():
                line = json.dumps(row.asDict(recursive=True), ensure_ascii=False, default=_cell)
                sys.stdout.write(f"{line}\n")
        case Style.CSV:
            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerow(chosen.columns)
            for row in chosen.toLocalIterator():
                writer.writerow([_cell(value) for value in row])
        case Style.TABLE:
            _print_table(chosen, most)
    sys.stdout.flush()


def _print_table(rows: DataFrame, most: int) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=1000)  # grep needs whole lines
    table = Table(
        *(escape(printable(column)) for column in rows.columns), box=None, pad_edge=False, header_style="bold"
    )
    found = rows.collect()
    for row in found[:most]:
        table.add_row(*(Text(printable(_cell(value))) for value in row))
    console.print(table)
    if len(found) > most:
        sys.stderr.write(f"headwater: only the first {most} rows; --limit, or --format json for all\n")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "backslashreplace")
    return str(value).lower() if isinstance(value, bool) else str(value)
