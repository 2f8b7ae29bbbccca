"""Frames: what workers send each other over one stream socket, in both directions.

A frame is a header (length of the payload, kind, number) and a payload. The number names a tunnel, or a question and
its answer. The same frames can be carried by any reliable byte stream, so also between machines.
"""

from __future__ import annotations

import struct
from typing import Final

HEADER: Final = struct.Struct("<IBI")
PAYLOAD_MAX_BYTES: Final = 64 * 1024
"""Request and response bytes in one frame: a large body must not hold up the frames of others."""

# From the worker that has the client to the owner.
BEGIN: Final = 1
"""A request begins in a tunnel: the client's address (a length byte and as many bytes), then bytes of the request."""
BEGIN_PLACED: Final = 2
"""As BEGIN, for a stream that is placed at the receiver although its name hashes to another shard."""
MORE: Final = 3
"""More bytes of the request."""
PAUSE: Final = 4
"""The client does not read: send no more of the response for now."""
RESUME: Final = 5
CANCEL: Final = 6
"""The client is gone."""

BEGIN_FOLLOW: Final = 7
"""A follower of many streams begins: the events of the receiver's streams come back, one in each DATA."""

# From the owner back.
WHOLE: Final = 10
"""A whole response. The tunnel can take the next request."""
DATA: Final = 11
"""Bytes of a response that continues."""
END: Final = 12
"""The response is complete. The tunnel can take the next request."""
LAST: Final = 13
"""The response is complete, and the client's connection is to be closed."""
CUT: Final = 14
"""The response cannot be completed: the client's connection must be aborted."""
HOLD: Final = 15
"""The owner takes no more of the request body for now."""
TAKE: Final = 16

# Between any two.
ASK: Final = 20
ANSWER: Final = 21
FEED: Final = 22
TAIL: Final = 23
"""What became durable of a stream that the receiver follows (`tails`)."""
LEAVE: Final = 24
"""A stream is not followed any more: its incarnation."""


def pieces(payload: bytes) -> list[bytes]:
    """A payload cut into what frames may carry."""
    return [payload[at : at + PAYLOAD_MAX_BYTES] for at in range(0, len(payload), PAYLOAD_MAX_BYTES)] or [b""]
