"""A client for streams that are folded to state: bootstrap, apply, tail, and bootstrap again when retention moved on.

    from headwater.client import Stream, follow

    with Stream("http://localhost:4437/ds/agents/user-1") as stream:
        for place in follow(stream, state):      # `state` has `restore` and `apply`
            print(place.next_offset, place.up_to_date)

It speaks HTTP to any server of the protocol and its extensions, and shares no code with ours.
"""

from headwater.client.errors import (
    ClientError,
    HistoryMissing,
    MalformedAnswer,
    NoEvents,
    OffsetGone,
    Refused,
    StreamMissing,
)
from headwater.client.follow import Place, State, follow
from headwater.client.multipart import Part
from headwater.client.stream import Batch, Bootstrap, Stream

__all__ = [
    "Batch",
    "Bootstrap",
    "ClientError",
    "HistoryMissing",
    "MalformedAnswer",
    "NoEvents",
    "OffsetGone",
    "Part",
    "Place",
    "Refused",
    "State",
    "Stream",
    "StreamMissing",
    "follow",
]
