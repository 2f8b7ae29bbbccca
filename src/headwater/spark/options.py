"""Parse and check the options of `format("headwater")`.

Invariant: an unknown option is an error that names the closest known one.
"""

from __future__ import annotations

import datetime as dt
import difflib
import functools
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeVar, cast, get_args

from headwater.spark.errors import OptionError
from headwater.spark.offsets import BEGINNING, SplitPlan
from headwater.spark.option_table import KAFKA_NAMES, KAFKA_ONLY, OPTIONS, REMOVED

MIB: Final = 1024 * 1024

EARLIEST: Final = "earliest"
LATEST: Final = "latest"

OnGone = Literal["fail", "restart", "bootstrap", "skip"]
ValueType = Literal["string", "binary"]
BadRecords = Literal["fail", "null"]
CommitMode = Literal["staged", "driver", "task"]
RowsAs = Literal["messages", "lines"]
Framing = Literal["json", "lines", "message"]
"""How rows form a body: a JSON array, one line per row, or a single row."""

Choice = TypeVar("Choice", bound=str)


_FROM_SPARK: Final = frozenset({"path", "checkpointlocation", "queryname"})
"""Spark's own options, which it passes to data sources."""

_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h)", re.ASCII)
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_GLOB: Final = re.compile(r"\*\*|\*|\?")
_WILD: Final = {"**": ".*", "*": "[^/]*", "?": "[^/]"}


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
    starting_ms: int | None
    """Instead of `starting`: the arrival time from which to read."""
    ending_ms: int | None
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
    with_headers: bool
    """Whether a query without a schema has the columns of state-protocol messages."""
    discovery_interval_s: float
    idle_wait_s: float

    def reads(self, stream: str) -> bool:
        """Whether to read a stream that was found by prefix, pattern or bucket."""
        return stream.startswith(self.prefix) and (not self.pattern or _expression(self.pattern)(stream) is not None)

    @property
    def waits_for_streams(self) -> bool:
        """Whether to wait for a stream that does not exist."""
        return self.on_gone in ("restart", "skip")


@dataclass(frozen=True, slots=True)
class SinkOptions:
    connection: ConnectionOptions
    stream: str
    stream_column: str
    value_column: str
    key_columns: tuple[str, ...]
    """If set, rows are state-protocol messages with these columns as key."""
    message_type: str
    operation_column: str
    content_type: str
    create_missing: bool
    order_by: tuple[str, ...]
    commit_mode: CommitMode
    staging_path: str
    checkpoint: str
    request_bytes_max: int
    rows_as: RowsAs
    producer_id: str
    batch_id: int
    has_batch_id: bool
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
        starting_ms=read.instant("startingTimestamp"),
        ending_ms=read.instant("endingTimestamp"),
        rows_per_batch_min=read.whole("minOffsetsPerTrigger", 0),
        batch_delay_max_s=read.duration("maxTriggerDelay"),
        rows_per_batch_max=read.whole("maxRowsPerBatch", 0),
        bytes_per_batch_max=read.whole("maxBytesPerBatch", 0),
        plan=SplitPlan(read.whole("splitBytes", 1), read.whole("minPartitions", 0)),
        on_gone=cast(OnGone, read.choice("onGone", get_args(OnGone))),
        value_type=cast(ValueType, read.choice("valueType", get_args(ValueType))),
        metadata_prefix=read.text("metadataPrefix"),
        bad_records=cast(BadRecords, read.choice("badRecords", get_args(BadRecords))),
        with_headers=read.truth("includeHeaders"),
        discovery_interval_s=read.number("discoveryInterval"),
        idle_wait_s=read.number("idleWait") / 1000,
    )
    if streams and (options.prefix or pattern):
        raise OptionError("streams cannot be combined with prefix or subscribePattern.")
    if not streams and not options.prefix and not pattern and not options.connection.bucket:
        raise OptionError("Nothing to read: set streams, prefix, subscribePattern, or bucket.")
    for by_time, by_offset in (("startingTimestamp", "startingOffsets"), ("endingTimestamp", "endingOffsets")):
        if read.has(by_time) and read.has(by_offset):
            raise OptionError(f"{by_time} cannot be combined with {by_offset}.")
    if options.starting_ms is not None and options.starting_ms > time.time() * 1000:
        raise OptionError(f"startingTimestamp {read.text('startingTimestamp')} is in the future.")
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
    """The text that every match of a regular expression begins with; possibly empty."""
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
        key_columns=read.names("keyColumns"),
        message_type=read.text("messageType"),
        operation_column=read.text("operationColumn"),
        content_type=read.text("contentType"),
        create_missing=read.truth("createMissing"),
        order_by=read.names("orderBy"),
        commit_mode=cast(CommitMode, read.choice("commitMode", get_args(CommitMode))),
        staging_path=read.text("stagingPath"),
        checkpoint=read.from_spark("checkpointLocation"),
        request_bytes_max=read.whole("maxRequestBytes", 1024),
        rows_as=cast(RowsAs, read.choice("rowsAs", get_args(RowsAs))),
        producer_id=read.text("producerId"),
        batch_id=read.whole("batchId", 0),
        has_batch_id=read.has("batchId"),
        parallel_requests=read.whole("parallelRequests", 1),
        close_streams=read.truth("closeStreams"),
    )
    if options.commit_mode == "driver" and not options.stream:
        raise OptionError(
            "commitMode=driver makes one append per batch, so it needs one target: set stream, or use staged."
        )
    if options.key_columns and not options.is_json:
        raise OptionError(f"keyColumns makes JSON messages; contentType is {options.content_type}.")
    if not options.key_columns and (options.message_type or options.operation_column):
        raise OptionError("messageType and operationColumn apply to state-protocol messages: set keyColumns too.")
    if options.has_batch_id and not options.producer_id:
        raise OptionError("batchId needs producerId, which must be the same for all batches of a query.")
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


def _kafka_only(name: str) -> str | None:
    """Why an option of Spark's connector for Kafka has no counterpart; None for other options."""
    return KAFKA_ONLY.get(name) or (KAFKA_ONLY["kafka."] if name.startswith("kafka.") else None)


class _OptionReader:
    """Parses options by name, and explains what is wrong with them."""

    def __init__(self, given: Mapping[str, str], side: Literal["source", "sink"]) -> None:
        known = {option.name.lower(): option for option in OPTIONS if option.side in ("both", side)}
        self._side = side
        self._given = {name.lower(): value for name, value in given.items()}
        for name in self._given:
            if name in REMOVED:
                raise OptionError(f"The option {name} was removed: {REMOVED[name]}.")
            if name in KAFKA_NAMES and name not in known:
                raise OptionError(f"The {side} has no option {name}, which is a Kafka option; use {KAFKA_NAMES[name]}.")
            if name not in known and (why := _kafka_only(name)):
                raise OptionError(f"The Kafka option {name} has no counterpart: {why}.")
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

    def has(self, name: str) -> bool:
        return name.lower() in self._given

    def names(self, name: str) -> tuple[str, ...]:
        """Names, separated by commas."""
        return tuple(one.strip() for one in self.text(name).split(",") if one.strip())

    def from_spark(self, name: str) -> str:
        """The value of an option of Spark itself."""
        return self._given.get(name.lower(), "")

    def number(self, name: str) -> float:
        try:
            value = float(self.text(name))
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise OptionError(f"{name} must be a number of at least 0, not {self.text(name)!r}.")
        return value

    def duration(self, name: str) -> float:
        """Seconds, or a number with a unit, as Spark's own options take it."""
        found = _DURATION.fullmatch(self.text(name).strip().lower())
        if found is None:
            return self.number(name)
        return float(found[1]) * _UNITS[found[2]]

    def whole(self, name: str, least: int) -> int:
        text = self.text(name)
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise OptionError(f"{name} must be a whole number of at least {least}, not {text!r}.")
        return int(text)

    def instant(self, name: str) -> int | None:
        """Milliseconds since 1970."""
        text = self.text(name).strip()
        if not text:
            return None
        if text.isascii() and text.isdigit():
            return int(text)
        try:
            moment = dt.datetime.fromisoformat(text)
        except ValueError:
            moment = None
        if moment is None or moment.tzinfo is None:
            raise OptionError(
                f"{name} must be a time with its zone, such as 2026-01-31T12:00:00Z, or milliseconds since 1970, not"
                f" {text!r}."
            )
        return round(moment.timestamp() * 1000)

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
