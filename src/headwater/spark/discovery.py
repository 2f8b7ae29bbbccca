"""The streams that a query reads: a list, all with a prefix, or those of a bucket.

Invariant: a stream that was found stays in the query. If it is deleted, `onGone` decides what happens.
"""

from __future__ import annotations

import time
from typing import Final

import msgspec

from headwater.spark.errors import DataGoneError, OptionError, StreamMissingError
from headwater.spark.message_runs import split_json
from headwater.spark.offsets import BEGINNING, are_of_two_streams
from headwater.spark.options import SourceOptions
from headwater.spark.protocol import StreamsClient

REGISTRY: Final = "__registry__"
_ROOT_PATH: Final = "/v1/stream/"


class _DiscoveryHeaders(msgspec.Struct):
    operation: str = ""


class _DiscoveryEvent(msgspec.Struct):
    type: str = ""
    key: str = ""
    headers: _DiscoveryHeaders = msgspec.field(default_factory=_DiscoveryHeaders)


_decode_event = msgspec.json.Decoder(_DiscoveryEvent).decode


class Discovery:
    """The names of the streams; `refresh` finds new ones."""

    def __init__(self, client: StreamsClient, options: SourceOptions) -> None:
        self._client = client
        self._options = options
        self._names: set[str] = set(options.streams)
        self._looked_at = float("-inf")
        self._registry_offset = BEGINNING
        self._listed: dict[str, str] = {}
        self._created: set[str] = set()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._names)

    @property
    def registry_offset(self) -> str | None:
        """The offset in the registry after the last known stream; None without a registry."""
        is_listed = bool(self._options.streams or self._options.connection.bucket)
        return None if is_listed else self._registry_offset

    @property
    def is_due(self) -> bool:
        """Whether to refresh: never for a list; a registry only once, because it is followed."""
        if self._options.streams:
            return False
        if self.registry_offset is not None:
            return self._registry_offset == BEGINNING
        return time.monotonic() - self._looked_at >= self._options.discovery_interval_s

    def refresh(self) -> None:
        if self._options.streams:
            return
        self._looked_at = time.monotonic()
        if self._options.connection.bucket:
            self._list_bucket()
        else:
            self._follow_registry()

    def take_created(self) -> set[str]:
        """Streams that were created, or created again, since the last call."""
        created, self._created = self._created, set()
        return created

    def _list_bucket(self) -> None:
        listed = self._client.listed_tails(self._options.prefix)
        self._created |= {name for name, tail in listed.items() if are_of_two_streams(tail, self._listed.get(name, ""))}
        self._listed = listed
        self._names.update(name for name in listed if self._options.reads(name))

    def _follow_registry(self) -> None:
        found: set[str] = set()
        while True:
            try:
                chunk = self._client.read(REGISTRY, self._registry_offset)
            except StreamMissingError as missing:
                raise OptionError(
                    f"prefix needs the stream {REGISTRY}, which the server does not have. Enable it"
                    " (DS_REGISTRY__ENABLED=true), name the streams, or use a bucket."
                ) from missing
            except DataGoneError:
                if self._registry_offset == BEGINNING:
                    raise
                # A server in memory mode was restarted and has a new registry.
                self._registry_offset = BEGINNING
                continue
            for element in split_json(chunk.body):
                self._learn(element, found)
            self._registry_offset = chunk.next_offset
            if chunk.up_to_date:
                break
        self._names |= found

    def _learn(self, element: msgspec.Raw, found: set[str]) -> None:
        try:
            event = _decode_event(element)
        except msgspec.DecodeError:
            return
        name = event.key.removeprefix(_ROOT_PATH)
        if event.type != "stream" or not self._options.reads(name) or name == REGISTRY:
            return
        if event.headers.operation == "delete":
            # A stream that was deleted before it was found is not an error.
            found.discard(name)
        else:
            found.add(name)
            self._created.add(name)
