"""The options of `format("headwater")`: names, values, defaults and purposes.

The docstring of the data source and the tables in `docs/spark.md` are generated from `OPTIONS`. Invariant: an unknown
option is an error that names the closest known one.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeVar, cast, get_args

from headwater.spark.errors import OptionError
from headwater.spark.offsets import BEGINNING, SplitPlan

MIB: Final = 1024 * 1024

EARLIEST: Final = "earliest"
LATEST: Final = "latest"

OnGone = Literal["fail", "restart", "bootstrap", "skip"]
ValueType = Literal["string", "binary"]
BadRecords = Literal["fail", "null"]
CommitMode = Literal["staged", "driver", "task"]
RowsAs = Literal["messages", "lines"]
Framing = Literal["json", "lines", "message"]
"""How rows make a body: a JSON array, a line each, or one row alone."""

Choice = TypeVar("Choice", bound=str)


@dataclass(frozen=True, slots=True)
class Option:
    """One option, as it is documented."""

    name: str
    side: Literal["both", "source", "sink"]
    default: str
    takes: str
    purpose: str


OPTIONS: Final = (
    Option("url", "both", "", "address", "The stream root, such as `http://localhost:4437/v1/stream`. Required."),
    Option("token", "both", "", "text", "Sent as `Authorization: Bearer …`. Spark redacts it in logs and in its UI."),
    Option("tokenFile", "both", "", "path", "A file with the token, on every node; read again when it changes."),
    Option("caFile", "both", "", "path", "PEM certificates to trust instead of those of the system; on every node."),
    Option("bucket", "both", "", "bucket id", "Work on the streams of this bucket (`/ds/{bucket}/…` beside the root)."),
    Option("requestTimeout", "both", "60", "seconds", "How long a server may be silent within a request."),
    Option(
        "retryTimeout",
        "both",
        "120",
        "seconds",
        "How long a request is retried, with back-off, while the server cannot be reached or answers 429 or 5xx."
        " Appends are retried too; their producer headers prevent duplicates.",
    ),
    Option(
        "streams",
        "source",
        "",
        "names",
        "The streams to read, separated by commas. A name with `*` (any text without a slash), `**` (any text) or `?`"
        " is a pattern.",
    ),
    Option(
        "prefix",
        "source",
        "",
        "text",
        "Read every stream whose name begins with this text. Streams that are created later join a running query."
        " Needs the server's `__registry__` stream, or `bucket`.",
    ),
    Option(
        "subscribePattern",
        "source",
        "",
        "regular expression",
        "Read every stream whose whole name matches this expression of Python. Streams that are created later join a"
        " running query. `prefix` is faster if it is enough; both together are allowed.",
    ),
    Option(
        "startingOffsets",
        "source",
        "earliest",
        "`earliest`, `latest`, an offset, or JSON",
        'Where a query without a checkpoint starts, or per stream: `{"orders": "latest", "users": "0000…"}`; streams'
        " that are not in the JSON start at the earliest. `earliest` is the earliest message that is retained.",
    ),
    Option(
        "endingOffsets",
        "source",
        "latest",
        "`latest`, an offset, or JSON",
        "Batch reads only: where to end. `latest` is the tail at the time of planning.",
    ),
    Option("maxRowsPerBatch", "source", "0", "rows", "Most rows of a micro-batch, over all streams; 0 is no limit."),
    Option(
        "maxBytesPerBatch",
        "source",
        "33554432",
        "bytes",
        "The most bytes of a micro-batch, over all streams; 0 is no limit. The default fits into one append.",
    ),
    Option(
        "minOffsetsPerTrigger",
        "source",
        "0",
        "rows",
        "Wait for so many rows before a micro-batch, but not longer than `maxTriggerDelay`.",
    ),
    Option("maxTriggerDelay", "source", "900", "seconds", "The longest wait for `minOffsetsPerTrigger` rows."),
    Option("splitBytes", "source", "16777216", "bytes", "The size of a task; larger ranges are split."),
    Option("minPartitions", "source", "0", "tasks", "Split ranges into at least about this many tasks."),
    Option(
        "onGone",
        "source",
        "fail",
        "`fail`, `restart`, `bootstrap`, `skip`",
        "What to do when a stream was deleted, or data that was not read yet is no longer retained (410). `fail`: stop"
        " with an error. `restart`: a stream that was deleted and created again is read from its beginning, a stream"
        " that does not exist is waited for, and data lost to retention is an error. `bootstrap`: the latest snapshot"
        " becomes a row with `snapshot = true`, and reading continues after it; a stream that was created again is"
        " read from its beginning, and a stream that does not exist is an error. `skip`: like `restart`, and data"
        " lost to retention is a warning.",
    ),
    Option("valueType", "source", "string", "`string`, `binary`", "The type of `value` in a query without a schema."),
    Option(
        "metadataPrefix",
        "source",
        "",
        "text",
        "A prefix for the names of the metadata columns, for messages with fields of the same names.",
    ),
    Option(
        "badRecords",
        "source",
        "fail",
        "`fail`, `null`",
        "What to do with a message that does not fit the schema, if that has no column `_corrupt`: fail, or use nulls.",
    ),
    Option("discoveryInterval", "source", "5", "seconds", "How often a bucket is searched for new streams."),
    Option(
        "idleWait",
        "source",
        "500",
        "milliseconds",
        "How long one call of Spark for new data may wait. Long-polls stay open between the calls. Spark asks several"
        " sources of one query one after the other: set 50 there.",
    ),
    Option(
        "stream",
        "sink",
        "",
        "name",
        "The stream to append to. Without it, the column `stream` of each row names the target.",
    ),
    Option("streamColumn", "sink", "stream", "column", "The column with the name of the target."),
    Option(
        "valueColumn",
        "sink",
        "value",
        "column",
        "The column to append: strings and binaries as they are (one JSON text each, for a JSON stream); structs,"
        " maps, arrays and numbers as JSON.",
    ),
    Option("contentType", "sink", "application/json", "media type", "The content type of the targets."),
    Option("createMissing", "sink", "false", "`true`, `false`", "Create targets that do not exist."),
    Option(
        "orderBy",
        "sink",
        "",
        "columns",
        "Sort the rows of each target by these columns before they are appended, within each task (with"
        " `commitMode=driver`, over the whole batch). With `commitMode=task` they must be unique within a target.",
    ),
    Option(
        "commitMode",
        "sink",
        "staged",
        "`staged`, `driver`, `task`",
        "When rows become visible. `staged`: when all tasks of the batch have succeeded, the driver appends their rows,"
        " task by task, so rows that Spark keeps in order arrive in order. `driver`: the same in one atomic append, for"
        " one target and batches up to `maxRequestBytes`. `task`: tasks append in parallel while the batch runs. That"
        " gives up the order of rows from different tasks, rows of a batch are visible before it is complete, and a"
        " query whose rows or their order differ on a retry fails for good.",
    ),
    Option(
        "stagingPath",
        "sink",
        "",
        "path or URI",
        "The directory for the rows of a batch that has not been committed. It must be shared by the driver and all"
        " executors. Default: the directory `headwater` inside `checkpointLocation`; for batch writes a temporary"
        " directory.",
    ),
    Option("maxRequestBytes", "sink", "50331648", "bytes", "The largest append. More rows are cut into several."),
    Option(
        "rowsAs",
        "sink",
        "messages",
        "`messages`, `lines`",
        "For targets that are not JSON: each row is one append (with `commitMode=task` this needs `orderBy`), or the"
        " rows of a task are one message with a line each.",
    ),
    Option(
        "producerId",
        "sink",
        "",
        "text",
        "Replaces the query id in the names of producers. A batch job that is run again with the same id appends"
        " nothing twice; a query that lost its checkpoint is refused instead of appending everything again.",
    ),
    Option("parallelRequests", "sink", "4", "requests", "Concurrent appends to different targets, per process."),
    Option("closeStreams", "sink", "false", "`true`, `false`", "Batch writes only: close the targets at the end."),
)

_FROM_SPARK: Final = frozenset({"path", "checkpointlocation", "queryname"})
"""Options of Spark itself, which it passes on."""

_GLOB: Final = re.compile(r"\*\*|\*|\?")
_WILD: Final = {"**": ".*", "*": "[^/]*", "?": "[^/]"}

_KAFKA: Final = {
    "subscribe": "streams",
    "assign": "streams",
    "topic": "stream",
    "topics": "streams",
    "topicpattern": "subscribePattern",
    "kafka.bootstrap.servers": "url",
    "bootstrap.servers": "url",
    "maxoffsetspertrigger": "maxRowsPerBatch",
    "maxbytespertrigger": "maxBytesPerBatch",
    "failondataloss": "onGone",
    "includeheaders": "the fields of JSON messages in a schema",
    "fetchoffset.numretries": "retryTimeout",
    "kafkaconsumer.polltimeoutms": "requestTimeout",
}
"""What options of Spark's connector for Kafka are called here."""

_REMOVED: Final = {
    "ondifferingretry": "it kept rows out of the target. commitMode=staged, the default, does not need it",
}


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How to reach the server. Pickled into every task."""

    url: str
    bucket: str = ""
    token: str = field(default="", repr=False)
    token_file: str = ""
    ca_file: str = ""
    request_timeout_s: float = 60.0
    retry_timeout_s: float = 120.0

    @property
    def root(self) -> str:
        """The URL before the name of a stream."""
        if not self.bucket:
            return self.url
        return f"{self.bucket_root}/{self.bucket}"

    @property
    def bucket_root(self) -> str:
        if self.url.endswith("/ds"):
            return self.url
        return self.url.removesuffix("/v1/stream") + "/ds"


@dataclass(frozen=True, slots=True)
class SourceOptions:
    connection: ConnectionOptions
    streams: tuple[str, ...]
    prefix: str
    starting: str | Mapping[str, str]
    ending: str | Mapping[str, str]
    pattern: str
    """Streams must match this regular expression; empty for all."""
    rows_per_batch_min: int
    batch_delay_max_s: float
    rows_per_batch_max: int
    bytes_per_batch_max: int
    plan: SplitPlan
    on_gone: OnGone
    value_type: ValueType
    metadata_prefix: str
    bad_records: BadRecords
    discovery_interval_s: float
    idle_wait_s: float

    def reads(self, stream: str) -> bool:
        """Whether a stream that was found by prefix, pattern or bucket is one to read."""
        return stream.startswith(self.prefix) and (not self.pattern or _expression(self.pattern)(stream) is not None)

    @property
    def waits_for_streams(self) -> bool:
        """Whether a stream that does not exist is waited for."""
        return self.on_gone in ("restart", "skip")


@dataclass(frozen=True, slots=True)
class SinkOptions:
    connection: ConnectionOptions
    stream: str
    stream_column: str
    value_column: str
    content_type: str
    create_missing: bool
    order_by: tuple[str, ...]
    commit_mode: CommitMode
    staging_path: str
    checkpoint: str
    request_bytes_max: int
    rows_as: RowsAs
    producer_id: str
    parallel_requests: int
    close_streams: bool

    @property
    def is_json(self) -> bool:
        return self.content_type.partition(";")[0].strip().lower() == "application/json"

    @property
    def framing(self) -> Framing:
        if self.is_json:
            return "json"
        return "lines" if self.rows_as == "lines" else "message"


def source_options(given: Mapping[str, str]) -> SourceOptions:
    read = _OptionReader(given, "source")
    streams = tuple(name.strip("/ ") for name in read.text("streams").split(",") if name.strip("/ "))
    pattern = read.pattern("subscribePattern")
    if any(_GLOB.search(name) for name in streams):
        if pattern or read.text("prefix"):
            raise OptionError("streams with patterns cannot be combined with prefix or subscribePattern.")
        pattern, streams = "|".join(map(_glob_expression, streams)), ()
    options = SourceOptions(
        connection=read.connection(),
        streams=streams,
        prefix=read.text("prefix") or _literal_prefix(pattern),
        pattern=pattern,
        starting=read.offsets("startingOffsets"),
        ending=read.offsets("endingOffsets"),
        rows_per_batch_min=read.whole("minOffsetsPerTrigger", 0),
        batch_delay_max_s=read.number("maxTriggerDelay"),
        rows_per_batch_max=read.whole("maxRowsPerBatch", 0),
        bytes_per_batch_max=read.whole("maxBytesPerBatch", 0),
        plan=SplitPlan(read.whole("splitBytes", 1), read.whole("minPartitions", 0)),
        on_gone=cast(OnGone, read.choice("onGone", get_args(OnGone))),
        value_type=cast(ValueType, read.choice("valueType", get_args(ValueType))),
        metadata_prefix=read.text("metadataPrefix"),
        bad_records=cast(BadRecords, read.choice("badRecords", get_args(BadRecords))),
        discovery_interval_s=read.number("discoveryInterval"),
        idle_wait_s=read.number("idleWait") / 1000,
    )
    if streams and (options.prefix or pattern):
        raise OptionError("streams excludes prefix and subscribePattern.")
    if not streams and not options.prefix and not pattern and not options.connection.bucket:
        raise OptionError("Nothing to read: set streams, prefix, subscribePattern, or bucket.")
    if options.ending == BEGINNING:
        raise OptionError("endingOffsets must be latest, an offset or JSON; a read that ends at earliest is empty.")
    return options


@functools.lru_cache(maxsize=16)
def _expression(pattern: str) -> Callable[[str], re.Match[str] | None]:
    return re.compile(pattern).fullmatch


def _glob_expression(glob: str) -> str:
    """A name with wildcards as a regular expression."""
    parts = _GLOB.split(glob)
    wild = iter(_GLOB.findall(glob))
    return "".join(re.escape(part) + _WILD.get(next(wild, ""), "") for part in parts)


def _literal_prefix(pattern: str) -> str:
    """Text with which every match of a regular expression begins; possibly empty."""
    literal = re.match(r"(?:[\w/-]|\\[.\-/])*", pattern)
    assert literal is not None
    found = literal[0]
    rest = pattern[len(found) :]
    if "|" in pattern:
        return ""
    # A quantifier belongs to the last character.
    if rest[:1] in ("*", "?", "{") and found:
        found = found[:-2] if found[-2:-1] == "\\" else found[:-1]
    return found.replace("\\", "")


def sink_options(given: Mapping[str, str]) -> SinkOptions:
    read = _OptionReader(given, "sink")
    options = SinkOptions(
        connection=read.connection(),
        stream=read.text("stream").strip("/"),
        stream_column=read.text("streamColumn"),
        value_column=read.text("valueColumn"),
        content_type=read.text("contentType"),
        create_missing=read.truth("createMissing"),
        order_by=tuple(name.strip() for name in read.text("orderBy").split(",") if name.strip()),
        commit_mode=cast(CommitMode, read.choice("commitMode", get_args(CommitMode))),
        staging_path=read.text("stagingPath"),
        checkpoint=read.from_spark("checkpointLocation"),
        request_bytes_max=read.whole("maxRequestBytes", 1024),
        rows_as=cast(RowsAs, read.choice("rowsAs", get_args(RowsAs))),
        producer_id=read.text("producerId"),
        parallel_requests=read.whole("parallelRequests", 1),
        close_streams=read.truth("closeStreams"),
    )
    if options.commit_mode == "driver" and not options.stream:
        raise OptionError(
            "commitMode=driver makes one append per batch, so it needs one target: set stream, or use staged."
        )
    if options.is_json and options.rows_as == "lines":
        raise OptionError(
            "rowsAs=lines is for targets that are not JSON; an append to a JSON stream has many messages."
        )
    if options.framing == "message" and options.commit_mode == "task" and not options.order_by:
        raise OptionError(
            f"With commitMode=task, each row of a {options.content_type} target is one append, and their order must be"
            " the same on a retry: set orderBy to a unique key, or commitMode=staged, or rowsAs=lines."
        )
    return options


def as_manual() -> str:
    """The options as text, for the data source's docstring."""
    lines = []
    for side, title in (("both", "Source and sink"), ("source", "Source"), ("sink", "Sink")):
        lines.append(f"\n{title} options:\n")
        for option in OPTIONS:
            if option.side == side:
                default = f", default {option.default}" if option.default else ""
                lines.append(f"* ``{option.name}`` ({option.takes.replace('`', '')}{default}): {option.purpose}")
    return "\n".join(lines)


def as_markdown() -> str:
    """The options as tables, for the documentation."""
    parts = []
    for side, title in (("both", "Source and sink"), ("source", "Source"), ("sink", "Sink")):
        rows = []
        for option in OPTIONS:
            if option.side == side:
                default = f"`{option.default}`" if option.default else "none"
                rows.append(f"| `{option.name}` | {default} | {option.takes} | {option.purpose} |")
        parts.append(f"### {title}\n\n| option | default | takes | purpose |\n|---|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts)


class _OptionReader:
    """Parses options by name, and explains what is wrong with them."""

    def __init__(self, given: Mapping[str, str], side: Literal["source", "sink"]) -> None:
        known = {option.name.lower(): option for option in OPTIONS if option.side in ("both", side)}
        self._side = side
        self._given = {name.lower(): value for name, value in given.items()}
        for name in self._given:
            if name in _REMOVED:
                raise OptionError(f"The option {name} was removed: {_REMOVED[name]}.")
            if name in _KAFKA and name not in known:
                raise OptionError(f"The {side} has no option {name}, which is one for Kafka; use {_KAFKA[name]}.")
            if name not in known and name not in _FROM_SPARK:
                raise OptionError(self._unknown(name, [option.name for option in known.values()]))
        self._defaults = {option.name: option.default for option in known.values()}

    def _unknown(self, name: str, known: list[str]) -> str:
        near = difflib.get_close_matches(name, [one.lower() for one in known], n=1)
        spelled = next((one for one in known if near and one.lower() == near[0]), None)
        hint = f" Did you mean {spelled}?" if spelled else f" The options are: {', '.join(known)}."
        return f"The {self._side} has no option {name}.{hint}"

    def text(self, name: str) -> str:
        value = self._given.get(name.lower())
        return self._defaults[name] if value is None else value

    def from_spark(self, name: str) -> str:
        """The value of an option of Spark itself."""
        return self._given.get(name.lower(), "")

    def number(self, name: str) -> float:
        try:
            value = float(self.text(name))
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise OptionError(f"{name} must be a number from 0, not {self.text(name)!r}.")
        return value

    def whole(self, name: str, least: int) -> int:
        text = self.text(name)
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise OptionError(f"{name} must be a whole number from {least}, not {text!r}.")
        return int(text)

    def truth(self, name: str) -> bool:
        return self.choice(name, ("true", "false")) == "true"

    def choice(self, name: str, choices: tuple[Choice, ...]) -> Choice:
        text = self.text(name).lower()
        for one in choices:
            if text == one:
                return one
        raise OptionError(f"{name} must be {' or '.join(choices)}, not {self.text(name)!r}.")

    def pattern(self, name: str) -> str:
        """A regular expression."""
        text = self.text(name)
        try:
            re.compile(text)
        except re.error as error:
            raise OptionError(f"{name} is not a regular expression: {error}.") from error
        return text

    def offsets(self, name: str) -> str | Mapping[str, str]:
        """`earliest`, `latest`, a token for every stream, or a mapping."""
        text = self.text(name).strip()
        if not text.startswith("{"):
            return BEGINNING if text == EARLIEST else text
        try:
            parsed = json.loads(text)
        except ValueError as error:
            raise OptionError(f"{name} is not valid JSON: {error}.") from error
        if not all(isinstance(value, str) for value in parsed.values()):
            raise OptionError(f"{name} must map stream names to earliest, latest or an offset.")
        return {stream: BEGINNING if value == EARLIEST else value for stream, value in parsed.items()}

    def connection(self) -> ConnectionOptions:
        url = self.text("url").rstrip("/")
        if not url.startswith(("http://", "https://")):
            given = f", not {url!r}" if url else ""
            raise OptionError(f"url must be the stream root, such as http://localhost:4437/v1/stream{given}.")
        for name in ("tokenFile", "caFile"):
            path = self.text(name)
            if path and not Path(path).is_file():
                raise OptionError(f"{name}: there is no file {path} on this node.")
        return ConnectionOptions(
            url,
            self.text("bucket"),
            self.text("token"),
            self.text("tokenFile"),
            self.text("caFile"),
            self.number("requestTimeout"),
            self.number("retryTimeout"),
        )
