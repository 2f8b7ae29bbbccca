"""The registry: a JSON stream with the creation and deletion of every stream, for browsers to follow.

Its events are those of the state protocol, so that folding them gives the list of streams. Only the server writes to
it. An event is appended after the change is durable, so a crash between the two can lose it. So at every start the
registry is folded, compared with the existing streams, and corrected, in slices while the server runs. A registry whose
events are mostly out of date is replaced by a new one.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from typing import Final

import msgspec

from headwater.core.content import JSON_MEDIA_TYPE
from headwater.core.errors import DataCorrupt, Refusal
from headwater.core.names import is_client_name
from headwater.core.rules import CreateRequest
from headwater.engine.scheduler import Scheduler, Timer
from headwater.engine.stream import LiveStream
from headwater.engine.stream_host import StreamHost

log = logging.getLogger("headwater.registry")

REGISTRY_NAME: Final = "__registry__"
EVENT_TYPE: Final = "stream"
BATCH: Final = 1_000
"""Events in one append, and streams compared in one slice: a few milliseconds."""
FOLD_BYTES: Final = 256 * 1024
"""How much of the registry is folded in one slice."""
RETRY_S: Final = 5.0
"""Delay before the registry is corrected after a failed write."""
REPLACE_MIN: Final = 10_000
"""Minimum number of outdated events before a registry is replaced."""
REPLACE_SHARE: Final = 4
"""It is replaced when it has this many times the events of a new one."""


class _RegistryHeaders(msgspec.Struct):
    operation: str


class _StreamValue(msgspec.Struct, rename="camel"):
    """A stream in an event of the registry."""

    path: str = ""
    content_type: str = ""
    created_at: int = 0


class _RegistryEvent(msgspec.Struct, omit_defaults=True):
    type: str
    key: str
    headers: _RegistryHeaders
    value: _StreamValue | None = None


class _ListedStreams:
    """The folded registry."""

    def __init__(self) -> None:
        self.values: dict[str, _StreamValue] = {}
        self.events = 0

    def apply(self, event: _RegistryEvent) -> None:
        self.events += 1
        if event.value is None:
            self.values.pop(event.key, None)
        else:
            self.values[event.key] = event.value

    @property
    def is_mostly_stale(self) -> bool:
        return self.events - len(self.values) > REPLACE_MIN and self.events > REPLACE_SHARE * len(self.values)


_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_event = msgspec.json.Decoder(_RegistryEvent).decode
_encode = msgspec.json.Encoder().encode


class StreamRegistry:
    def __init__(self, engine: StreamHost, scheduler: Scheduler) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._events: list[_RegistryEvent] = []
        """Events that are not appended yet: of this loop iteration, or since a correction began."""
        self._correction: Iterator[None] | None = None
        self._timer: Timer | None = None
        self._is_off = False

    def start(self) -> None:
        """Create the registry if it is missing, make it read-only for clients, and begin to correct it."""
        self._engine.server_streams.add(REGISTRY_NAME)
        self._engine.publisher.on_created.append(self._created)
        self._engine.publisher.on_deleted.append(self._deleted)
        self._correct()

    def stop(self) -> None:
        self._is_off = True
        if self._timer is not None:
            self._timer.cancel()

    # -- events of streams -------------------------------------------------------------------------------------------

    def _created(self, stream: LiveStream) -> None:
        if _is_listed(stream.name):
            self._report(_written(stream, "insert"))

    def _deleted(self, stream: LiveStream) -> None:
        if _is_listed(stream.name):
            self._report(_removed(stream.name))

    def _report(self, event: _RegistryEvent) -> None:
        """Append at the end of the loop iteration: one append for all streams that were created and deleted in it."""
        if not self._events and self._correction is None:
            self._scheduler.soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        if self._is_off or self._correction is not None:
            return
        events, self._events = self._events, []
        for start in range(0, len(events), BATCH):
            self._append(events[start : start + BATCH])

    def _append(self, events: Sequence[_RegistryEvent]) -> None:
        try:
            self._engine.append(
                REGISTRY_NAME, JSON_MEDIA_TYPE, _encode(events), None, None, False, self._appended, by_server=True
            )
        except Refusal as refusal:
            self._appended(refusal)

    def _appended(self, result: object) -> None:
        if isinstance(result, Refusal):
            log.warning("cannot write the registry; it is corrected in %g s: %s", RETRY_S, result.detail)
            self._correct_later()

    # -- correction --------------------------------------------------------------------------------------------------

    def _correct_later(self) -> None:
        if self._timer is None and not self._is_off:
            self._timer = self._scheduler.later(RETRY_S, self._correct)

    def _correct(self) -> None:
        """Make the registry list exactly the existing streams. New events wait until that is done."""
        self._timer = None
        if self._is_off or self._correction is not None:
            return
        self._correction = self._steps()
        self._engine.after_all_pending(self._next_step, None)

    def _next_step(self, refusal: Refusal | None = None) -> None:
        if self._is_off or self._correction is None:
            return
        try:
            if refusal is not None:
                raise refusal
            next(self._correction)
        except StopIteration:
            self._correction = None
            self._flush()
        except Refusal as failure:
            self._correction = None
            self._appended(failure)
        else:
            self._scheduler.soon(self._next_step)

    def _steps(self) -> Iterator[None]:
        listed = _ListedStreams()
        registry = self._engine.catalog.by_name.get(REGISTRY_NAME)
        if registry is None:
            self._create()
        elif registry.deleted:
            log.warning("%s was deleted while forks read from it, so it is no longer maintained", REGISTRY_NAME)
            self._is_off = True
            return
        elif (reason := (yield from self._fold(registry, listed))) is not None:
            if registry.children:
                log.warning("%s %s; it has forks, so it cannot be replaced", REGISTRY_NAME, reason)
                self._is_off = registry.closed or not registry.type.json
            else:
                log.info("%s %s; it is replaced by a new one", REGISTRY_NAME, reason)
                self._engine.delete(REGISTRY_NAME, _ignore, by_server=True)
                self._create()
                listed = _ListedStreams()
        if not self._is_off:
            yield from self._compare(listed)

    def _create(self) -> None:
        request = CreateRequest(REGISTRY_NAME, JSON_MEDIA_TYPE, None, None, False, b"")
        self._engine.create(request, self._appended, by_server=True)

    def _fold(self, registry: LiveStream, listed: _ListedStreams) -> Generator[None, None, str | None]:
        """Fold the registry in slices; returns why it should be replaced, or None."""
        if registry.closed:
            return "is closed"
        if not registry.type.json:
            return "is not a JSON stream"
        if registry.mortal:
            return "has an expiry"
        reader = self._engine.reader
        start = registry.retained
        try:
            while start.message_index < registry.durable_index:
                chunk = reader.chunk(registry, start, FOLD_BYTES)
                # Each message is stored with a comma after it.
                for element in _elements(b"[" + b"".join(reader.buffers(chunk))[:-1] + b"]"):
                    event = _event_of(element)
                    if event is not None:
                        listed.apply(event)
                start = chunk.end
                yield
        except DataCorrupt:
            return "is damaged"
        return "has mostly events that are out of date" if listed.is_mostly_stale else None

    def _compare(self, listed: _ListedStreams) -> Iterator[None]:
        """Append the missing events. Streams may be created and deleted meanwhile; their events follow."""
        values = listed.values
        names = iter(tuple(self._engine.catalog.by_name))
        missing = dict(values)
        while batch := tuple(islice(names, BATCH)):
            events = []
            for name in batch:
                stream = self._engine.catalog.by_name.get(name)
                if stream is None or not stream.visible or stream.deleted or not _is_listed(name):
                    continue
                value = missing.pop(name, None)
                if value != _value(stream):
                    events.append(_written(stream, "insert" if value is None else "update"))
            self._append_to(listed, events)
            yield
        removed = iter(missing)
        while batch := tuple(islice(removed, BATCH)):
            self._append_to(listed, [_removed(name) for name in batch])
            yield
        self._events = [event for event in self._events if _changes_list(event, listed)]

    def _append_to(self, listed: _ListedStreams, events: Sequence[_RegistryEvent]) -> None:
        for event in events:
            listed.apply(event)
        if events:
            self._append(events)


def _changes_list(event: _RegistryEvent, listed: _ListedStreams) -> bool:
    """Apply a delayed event to the list; return whether it changes it."""
    if listed.values.get(event.key) == event.value:
        return False
    if event.value is not None and event.key in listed.values:
        event.headers = _RegistryHeaders("update")
    listed.apply(event)
    return True


def _event_of(element: msgspec.Raw) -> _RegistryEvent | None:
    """Parse an event of the registry. There may be other messages from a time when clients could write."""
    try:
        event = _decode_event(element)
    except msgspec.DecodeError:
        return None
    if event.type != EVENT_TYPE:
        return None
    if event.headers.operation == "delete":
        event.value = None
    elif event.value is None:
        return None
    return event


def _ignore(_: object) -> None:
    """Ignore the result: later entries of the queue show whether the write succeeded."""


def _is_listed(name: str) -> bool:
    return name != REGISTRY_NAME and is_client_name(name)


def _value(stream: LiveStream) -> _StreamValue:
    return _StreamValue(stream.name, stream.type.header, stream.created_ms)


def _written(stream: LiveStream, operation: str) -> _RegistryEvent:
    return _RegistryEvent(EVENT_TYPE, stream.name, _RegistryHeaders(operation), _value(stream))


def _removed(name: str) -> _RegistryEvent:
    return _RegistryEvent(EVENT_TYPE, name, _RegistryHeaders("delete"))
