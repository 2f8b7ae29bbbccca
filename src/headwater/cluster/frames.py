"""The frames that workers send each other over one stream socket, in both directions.

A frame is a header (length of the payload, kind, number) and a payload. The number identifies a relayed request, or a
question and its answer. No number is used twice on a connection, so a frame that arrives late cannot reach another
request. The frames work over any reliable byte stream, and so between machines, too.
"""

from __future__ import annotations

import struct
from typing import Final

HEADER: Final = struct.Struct("<IBQ")
PAYLOAD_MAX_BYTES: Final = 64 * 1024
"""The most request or response bytes in one frame: a large body must not delay other frames."""

# From the worker that has the client to the owner.
BEGIN: Final = 1
"""A request begins: the client's address (a length byte and the bytes), then bytes of the request."""
BEGIN_PLACED: Final = 2
"""As BEGIN, for a stream that is placed at the receiver although its name hashes to another shard."""
MORE: Final = 3
"""More bytes of the request."""
PAUSE: Final = 4
"""The client does not read: pause the response."""
RESUME: Final = 5
CANCEL: Final = 6
"""The client has disconnected."""

BEGIN_FOLLOW: Final = 7
"""A follower of many streams starts: the receiver sends the events of its streams, one in each DATA."""
AHEAD: Final = 32
"""Added to BEGIN or BEGIN_PLACED: earlier requests of the client's connection have no response yet. The body is sent at
once, and its end after these responses."""
BEGINS: Final = frozenset((BEGIN, BEGIN_PLACED, BEGIN_FOLLOW, BEGIN | AHEAD, BEGIN_PLACED | AHEAD))

# From the owner to the worker that has the client.
WHOLE: Final = 10
"""A whole response."""
DATA: Final = 11
"""Bytes of a response that continues."""
END: Final = 12
"""The response is complete."""
LAST: Final = 13
"""The response is complete, and the client's connection must be closed."""
CUT: Final = 14
"""The response cannot be completed: the client's connection must be aborted."""
HOLD: Final = 15
"""Pause the request body."""
TAKE: Final = 16

# Between any two.
ASK: Final = 20
ANSWER: Final = 21
FEED: Final = 22
TAIL: Final = 23
"""New durable messages of a stream that the receiver follows (`tails`)."""
LEAVE: Final = 24
"""Stop following a stream: its incarnation."""
USAGE: Final = 25
"""The sender's usage of what is limited for the server as a whole (`usage`)."""


def pieces(payload: bytes) -> list[bytes]:
    """Split a payload into pieces that fit into frames."""
    return [payload[at : at + PAYLOAD_MAX_BYTES] for at in range(0, len(payload), PAYLOAD_MAX_BYTES)] or [b""]
