"""Find the ancestor that has the data before a fork point, without walking the chain of forks.

The data before a fork's own is in the nearest ancestor whose data begins earlier: the fork's *origin*. (A source
that was itself forked at that point or later has none of it.) So along origins, data begins earlier and earlier, and
the ancestor of a given position can be searched for. Besides its origin, each fork has one pointer far up the
chain (Myers' skew-binary jump pointers), which makes the search logarithmic: a read on a chain of 3,000 forks takes
about 20 steps, plus the spans that it returns.
"""

from __future__ import annotations

from collections.abc import Mapping

from headwater.core.errors import DataCorrupt
from headwater.engine.stream import Lineage, LiveStream


class Lineages:
    """The lineages of all streams, computed when they are first needed."""

    def __init__(self, by_id: Mapping[int, LiveStream]) -> None:
        self._by_id = by_id

    def of(self, stream: LiveStream) -> Lineage:
        lineage = stream.lineage
        return lineage if lineage is not None else self._compute(stream)

    def owner(self, stream: LiveStream, message_index: int) -> LiveStream:
        """The nearest of the stream and its ancestors whose data begins at `message_index` or before."""
        while stream.base_index > message_index:
            lineage = self.of(stream)
            stream = lineage.jump if lineage.jump.base_index > message_index else lineage.origin
        return stream

    def below(self, stream: LiveStream, byte_position: int) -> tuple[LiveStream, LiveStream | None]:
        """The nearest of the stream and its ancestors whose data begins at `byte_position` or before, and its
        predecessor."""
        previous = None
        while stream.base_position > byte_position:
            lineage = self.of(stream)
            if lineage.jump.base_position > byte_position:
                stream = lineage.jump
            else:
                previous, stream = stream, lineage.origin
        return stream, previous

    def _compute(self, stream: LiveStream) -> Lineage:
        """Compute it for the stream and all ancestors without one, iteratively: chains may be thousands deep."""
        waiting = [stream]
        while (fork := waiting[-1].fork) is not None:
            source = self._by_id.get(fork.source_id)
            if source is None:
                name = waiting[-1].name
                raise DataCorrupt(
                    f"The source of stream {name!r} is missing, and with it the data before the fork; restore a backup."
                )
            if source.lineage is not None:
                break
            waiting.append(source)
        while len(waiting) > 1:
            source = waiting.pop()
            source.lineage = self._lineage_of(source)
        stream.lineage = lineage = self._lineage_of(stream)
        return lineage

    def _lineage_of(self, stream: LiveStream) -> Lineage:
        if stream.fork is None:
            return Lineage(stream, stream, 0, 0)
        source = self._by_id[stream.fork.source_id]
        # The fork inherits nothing from a source whose data begins at the fork point or later.
        origin = self.owner(source, max(0, stream.base_index - 1))
        above = self.of(origin)
        far = self.of(above.jump)
        even = above.depth - far.depth == far.depth - self.of(far.jump).depth
        jump = far.jump if even and above.depth else origin
        return Lineage(origin, jump, above.depth + 1, self.of(source).generation + 1)
