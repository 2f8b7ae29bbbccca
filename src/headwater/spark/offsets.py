"""Spark's offset of a query: for each stream, the protocol offset up to which it was read.

A `Place` is the entry of one stream. Besides the protocol's token it holds how many messages are before it and, only
for servers that cannot bound a read, how many messages after the token were already read. The third part of a token is
the incarnation of the stream. Checkpoints of earlier releases have tokens of two parts, whose incarnation is unknown.
Invariant: a place always has the same JSON text, because Spark compares offsets as text.
"""

from __future__ import annotations

import base64
import functools
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from headwater.spark.errors import HeadwaterError

BEGINNING: Final = "-1"

UNKNOWN: Final = ""
"""The incarnation of a token of two parts, and of tokens of other servers."""

_TOKEN: Final = re.compile(r"([0-9a-f]{16})_([0-9a-f]{16})(?:_([0-9a-f]{16}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Place:
    """A position of a query in one stream."""

    offset: str
    position: int = 0
    """Messages before this place; bytes if the server does not send message boundaries."""
    skip: int = 0
    """Messages (or bytes) after `offset` that were read as well."""

    def to_json(self) -> dict[str, Any]:
        spelled: dict[str, Any] = {"offset": self.offset, "position": self.position}
        if self.skip:
            spelled["skip"] = self.skip
        return spelled

    @classmethod
    def from_json(cls, spelled: Mapping[str, Any]) -> Place:
        try:
            return cls(str(spelled["offset"]), int(spelled["position"]), int(spelled.get("skip", 0)))
        except (KeyError, TypeError, ValueError) as error:
            raise HeadwaterError(f"The checkpoint has an offset that is not of this source: {spelled!r}.") from error


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How a batch is split into tasks. Stored with the batch, so that a retry splits it in the same way."""

    split_bytes: int = 16 * 1024 * 1024
    tasks_min: int = 0

    def to_json(self) -> dict[str, Any]:
        """Empty for the default options, so the defaults must not change."""
        if self == SplitPlan():
            return {}
        return {"splitBytes": self.split_bytes, "minPartitions": self.tasks_min}

    @classmethod
    def from_json(cls, spelled: Mapping[str, Any]) -> SplitPlan:
        """The plan of the batch that ends at this offset."""
        plan = spelled.get(_META, {})
        return cls(int(plan["splitBytes"]), int(plan["minPartitions"])) if "splitBytes" in plan else cls()


_META: Final = ""
"""The member of an offset that is not a stream: it has the plan, and the places if they are packed."""
_PACKED: Final = "packed"
PACKED_ABOVE: Final = 200
"""An offset with at least this many streams is packed: Spark stores it with every batch and compares it often."""
_PACKED_LEVEL: Final = 3

START: Final = Place(BEGINNING)

Places = dict[str, Place]


def places_from_json(spelled: Mapping[str, Any]) -> Mapping[str, Place]:
    """The places of an offset."""
    packed = spelled.get(_META, {}).get(_PACKED)
    if packed is not None:
        return _unpacked(str(packed))
    return {stream: Place.from_json(place) for stream, place in spelled.items() if stream != _META}


def offset_to_json(places: Mapping[str, Place], plan: SplitPlan | None = None) -> dict[str, Any]:
    """An offset: a member for each stream, or all of them in one text if there are many."""
    meta = plan.to_json() if plan is not None else {}
    if len(places) <= PACKED_ABOVE:
        spelled = {stream: places[stream].to_json() for stream in sorted(places)}
        return {_META: meta} | spelled if meta else spelled
    return {_META: meta | {_PACKED: _packed(places)}}


def _packed(places: Mapping[str, Place]) -> str:
    """Names, tokens and counts as lines, compressed. Equal places give equal texts."""
    lines = []
    for stream in sorted(places):
        place = places[stream]
        counts = f"\t{place.position}\t{place.skip}" if place != _counted(place.offset) else ""
        lines.append(f"{stream}\t{place.offset}{counts}")
    return base64.b85encode(zlib.compress("\n".join(lines).encode(), _PACKED_LEVEL)).decode()


@functools.lru_cache(maxsize=4)
def _unpacked(packed: str) -> Mapping[str, Place]:
    """The places of a packed text; Spark passes the same offsets several times."""
    try:
        lines = zlib.decompress(base64.b85decode(packed)).decode().split("\n")
        places: Places = {}
        for line in lines:
            stream, offset, *counts = line.split("\t")
            places[stream] = Place(offset, *map(int, counts)) if counts else _counted(offset)
    except (ValueError, zlib.error) as error:
        raise HeadwaterError("The checkpoint has an offset that is not of this source.") from error
    return MappingProxyType(places)


def _counted(offset: str) -> Place:
    """The place of an offset whose first part is the number of messages, as it is on our servers."""
    return Place(offset, split_token(offset)[0] if _TOKEN.fullmatch(offset) else 0)


def split_token(token: str) -> tuple[int, int]:
    """Messages and stored bytes before an offset. Only for servers with documented tokens (extension `frames`)."""
    if token == BEGINNING:
        return 0, 0
    found = _TOKEN.fullmatch(token)
    if found is None:
        raise HeadwaterError(f"Offset {token!r} is malformed; use an offset that the server returned.")
    return int(found[1], 16), int(found[2], 16)


def at(token: str) -> Place:
    """The place of such a token."""
    return Place(token, split_token(token)[0])


def incarnation_of(token: str) -> str:
    """Which incarnation of its stream a token belongs to, or `UNKNOWN`."""
    found = _TOKEN.fullmatch(token)
    return found[3] or UNKNOWN if found is not None else UNKNOWN


def are_of_two_streams(one: str, other: str) -> bool:
    """Whether two tokens of one name are known to belong to different incarnations."""
    first, second = incarnation_of(one), incarnation_of(other)
    return first != second and UNKNOWN not in (first, second)


def respelled(token: str, incarnation: str) -> str:
    """The token of the same place with this incarnation, or with two parts if that is `UNKNOWN`."""
    index, position = split_token(token)
    place = f"{index:016x}_{position:016x}"
    return f"{place}_{incarnation}" if incarnation else place


def bytes_between(start: Place, end: Place) -> int:
    """Stored bytes from one place to another; only for servers with documented tokens."""
    return split_token(end.offset)[1] - split_token(start.offset)[1]
