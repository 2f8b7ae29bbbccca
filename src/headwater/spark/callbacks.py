"""Start py4j's callback server early, so that `foreachBatch` works in processes with many open files.

The JVM calls `foreachBatch` functions through that server, which uses select(); select() cannot handle descriptors
above 1023. In a process with more open files the server stops immediately, and the query waits forever. A server that
is started early keeps its low descriptor.
"""

from __future__ import annotations

from typing import Final

from headwater.spark.errors import TooManyDescriptorsError

SELECT_LIMIT: Final = 1024


def start_callback_server() -> None:
    """Start the server if it is not running, and check its descriptor. Spark Connect does not use this server."""
    from pyspark import SparkContext  # noqa: PLC0415 - workers import this package and need no context
    from pyspark.java_gateway import ensure_callback_server_started  # noqa: PLC0415

    gateway = SparkContext._gateway
    if gateway is None:
        return
    ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]
    check_descriptor(gateway._callback_server.server_socket.fileno())


def check_descriptor(number: int) -> None:
    if number >= SELECT_LIMIT:
        raise TooManyDescriptorsError(
            f"foreachBatch would wait forever: this process has more than {SELECT_LIMIT} files or sockets open, and"
            f" py4j cannot use descriptor {number}. Start Spark with headwater.spark.session() before opening the"
            " others, or close some and restart the process."
        )
