"""The documentation of the options of `format("headwater")`: names, values, defaults and purposes.

The docstring of the data source and the tables in `docs/spark.md` are generated from `OPTIONS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal


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
    Option("requestTimeout", "both", "60", "seconds", "How long to wait for data within a request."),
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
        "Read every stream whose name begins with this text. A running query picks up streams that are created later."
        " Needs the server's `__registry__` stream, or `bucket`.",
    ),
    Option(
        "subscribePattern",
        "source",
        "",
        "regular expression",
        "Read every stream whose whole name matches this Python regular expression. A running query picks up streams"
        " that are created later. Prefer `prefix`, which is faster; both can be combined.",
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
    Option(
        "startingTimestamp",
        "source",
        "",
        "time",
        "Instead of `startingOffsets`: start with the first message that arrived at this time or later. RFC 3339, such"
        " as `2026-01-31T12:00:00Z`, or milliseconds since 1970; not in the future.",
    ),
    Option(
        "endingTimestamp",
        "source",
        "",
        "time",
        "Batch reads only, instead of `endingOffsets`: end before the first message that arrived at this time or"
        " later.",
    ),
    Option("maxRowsPerBatch", "source", "0", "rows", "Most rows of a micro-batch, over all streams; 0 means no limit."),
    Option(
        "maxBytesPerBatch",
        "source",
        "33554432",
        "bytes",
        "The most bytes of a micro-batch, over all streams; 0 means no limit. The default fits into one append.",
    ),
    Option(
        "minOffsetsPerTrigger",
        "source",
        "0",
        "rows",
        "Wait for this many rows before a micro-batch, but no longer than `maxTriggerDelay`.",
    ),
    Option(
        "maxTriggerDelay",
        "source",
        "900",
        "seconds",
        "The longest wait for `minOffsetsPerTrigger` rows. A unit may follow: `15m`, `30s`, `1h`, `500ms`.",
    ),
    Option("splitBytes", "source", "16777216", "bytes", "The size of a task; larger ranges are split."),
    Option("minPartitions", "source", "0", "tasks", "Split ranges into at least about this many tasks."),
    Option(
        "onGone",
        "source",
        "fail",
        "`fail`, `restart`, `bootstrap`, `skip`",
        "What to do when a stream was deleted, or unread data is no longer retained (410). `fail`: stop with an error."
        " `restart`: read a recreated stream from its beginning, wait for a missing stream, and fail if data was lost"
        " to retention. `bootstrap`: turn the latest snapshot into a row with `snapshot = true` and continue after it;"
        " read a recreated stream from its beginning, and fail if a stream is missing. `skip`: like `restart`, but"
        " only warn if data was lost to retention.",
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
        "What to do with a message that does not fit a schema without a column `_corrupt`: fail, or use nulls.",
    ),
    Option(
        "includeHeaders",
        "source",
        "false",
        "`true`, `false`",
        "Add the columns `key` (string) and `headers` (map of strings) of state-protocol messages; both are null for"
        " other messages.",
    ),
    Option("discoveryInterval", "source", "5", "seconds", "How often a bucket is searched for new streams."),
    Option(
        "idleWait",
        "source",
        "500",
        "milliseconds",
        "How long one call of Spark for new data may wait. Long-polls stay open between the calls. If a query has"
        " several sources, Spark calls them one after the other: set 50.",
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
    Option(
        "keyColumns",
        "sink",
        "",
        "columns",
        "Append each row as a state-protocol message: an upsert whose key is made of these columns and whose value has"
        " all columns. Instead of `valueColumn`. With the output mode `complete`, each batch begins with a `reset`.",
    ),
    Option("messageType", "sink", "", "text", "With `keyColumns`: the `type` of the messages; by default the target."),
    Option(
        "operationColumn",
        "sink",
        "",
        "column",
        "With `keyColumns`: a column with the operation of each row, `insert`, `update`, `upsert` or `delete`.",
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
        " one target and batches up to `maxRequestBytes`. `task`: tasks append in parallel while the batch runs. Rows"
        " from different tasks are then in no particular order, rows of a batch are visible before it is complete, and"
        " a query whose rows or their order differ on a retry fails permanently.",
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
    Option("maxRequestBytes", "sink", "50331648", "bytes", "The largest append; more rows are split."),
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
        "Replaces the query id in producer ids. A batch job that is run again with the same id appends nothing twice; a"
        " query that lost its checkpoint fails instead of appending everything again.",
    ),
    Option(
        "batchId",
        "sink",
        "0",
        "number",
        "For writes in `foreachBatch`, with `producerId`: the number of the batch. A batch that is repeated appends"
        " nothing twice.",
    ),
    Option("parallelRequests", "sink", "4", "requests", "Concurrent appends to different targets, per process."),
    Option("closeStreams", "sink", "false", "`true`, `false`", "Batch writes only: close the targets at the end."),
)

KAFKA_NAMES: Final = {
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
    "startingoffsetsbytimestamp": "startingTimestamp",
    "endingoffsetsbytimestamp": "endingTimestamp",
    "txnappid": "producerId",
    "txnversion": "batchId",
    "fetchoffset.numretries": "retryTimeout",
    "fetchoffset.retryintervalms": "retryTimeout",
    "maxrecordsperpartition": "splitBytes or minPartitions",
    "kafkaconsumer.polltimeoutms": "requestTimeout",
}
"""Our names for options of Spark's connectors for Kafka and Delta."""

KAFKA_ONLY: Final = {
    "kafka.group.id": "there are no consumer groups; a query keeps its offsets in its checkpoint",
    "groupidprefix": "there are no consumer groups; a query keeps its offsets in its checkpoint",
    "startingoffsetsbytimestampstrategy": "without a message since startingTimestamp a query starts at the tail",
    "kafka.": "settings of Kafka's client do not apply; the connection is set by url, token, tokenFile and caFile",
}
"""Options of Spark's connector for Kafka without a counterpart, by name or beginning of the name, and why."""

REMOVED: Final = {
    "ondifferingretry": "it kept rows out of the target. commitMode=staged, the default, does not need it",
}


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
