"""The stream that readers see under a name while a deletion is not durable yet.

The catalog has the pending state: a deletion takes effect there at once. Readers see the durable state, so until the
deletion is durable the stream is kept here.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping

from headwater.core.catalog import Catalog
from headwater.engine.stream import LiveStream


class DurableView:
    def __init__(self, catalog: Catalog[LiveStream]) -> None:
        self._by_name = catalog.by_name
        self._deleting: dict[str, LiveStream] = {}
        """Streams that readers see until their deletion is durable."""
        self._removing: dict[int, LiveStream] = {}
        """Incarnations that such a deletion removes; until then they can be read, directly or through their forks."""
        self._soft_deleted: dict[str, LiveStream] = {}
        """Deleted sources that are removed with their last fork. Readers get 410 until that is durable."""
        self.by_id: Mapping[int, LiveStream] = ChainMap(catalog.by_id, self._removing)
        """Every incarnation that can be read."""

    @property
    def is_empty(self) -> bool:
        """Whether no deletion is pending."""
        return not (self._deleting or self._removing or self._soft_deleted)

    def find(self, name: str) -> LiveStream | None:
        """The stream that readers see under a name, in any state."""
        stream = self._by_name.get(name)
        if stream is not None and stream.visible:
            return stream
        return self._deleting.get(name) or self._soft_deleted.get(name)

    def deleting(self, name: str) -> LiveStream | None:
        """The stream of this name whose deletion is not durable yet."""
        return self._deleting.get(name)

    def is_soft_deleted(self, stream: LiveStream) -> bool:
        """Whether the stream is durably deleted and kept for its forks only."""
        return stream.deleted and self._deleting.get(stream.name) is not stream

    def on_deletion_decided(self, stream: LiveStream, removed: Iterable[LiveStream]) -> None:
        for gone in removed:
            self._removing[gone.id] = gone
            if gone is not stream:
                self._soft_deleted[gone.name] = gone
        if stream.visible:
            self._deleting[stream.name] = stream

    def on_creation_durable(self, stream: LiveStream, *, is_deleted: bool) -> None:
        """Keep a stream visible that was deleted before its creation became durable, until the deletion is durable."""
        if is_deleted:
            self._deleting[stream.name] = stream

    def on_deletion_durable(self, stream: LiveStream, removed: Iterable[int]) -> None:
        if self._deleting.get(stream.name) is stream:
            del self._deleting[stream.name]
        for stream_id in removed:
            gone = self._removing.pop(stream_id, None)
            if gone is not None and self._soft_deleted.get(gone.name) is gone:
                del self._soft_deleted[gone.name]
