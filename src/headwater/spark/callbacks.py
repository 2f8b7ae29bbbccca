"""Calls from the JVM to this process, which `foreachBatch` is made of.

py4j's server for them waits by select(), which takes no descriptor above 1023. In a process with more open files the
server ends at once, and a query with `foreachBatch` waits for ever. A server that is started early keeps its low
descriptor, whatever is opened later.
"""

from __future__ import annotations

from typing import Final

from headwater.spark.errors import TooManyDescriptorsError

SELECT_LIMIT: Final = 1024


def start_callback_server() -> None:
    """Start the server if it does not run yet, and check that it can work. Spark Connect has none and needs none."""
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
            f"foreachBatch would wait for ever: this process has more than {SELECT_LIMIT} files or sockets open, and"
            f" py4j cannot wait at descriptor {number}. Start Spark with headwater.spark.session() before the others"
            " are opened, or close some and start the process again."
        )
