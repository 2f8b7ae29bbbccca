"""The registry: a JSON stream that tells of every stream that comes and goes, for browsers to follow.

Its events are those of the state protocol, so that folding them gives the list of streams. An event is appended after
what it tells of is durable; a crash can fall between the two, so at every start the registry is folded, compared with
the streams there are, and put right. Clients may read it, and nothing they do to it is lasting.
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from headwater.core.content import JSON_MEDIA_TYPE
from headwater.core.errors import Refusal
from headwater.core.names import is_client_name
from headwater.core.rules import CreateRequest
from headwater.engine.engine import Engine
from headwater.engine.scheduler import Scheduler, Timer
from headwater.engine.stream import LiveStream

log = logging.getLogger("headwater.registry")

REGISTRY_NAME: Final = "__registry__"
EVENT_TYPE: Final = "stream"
BATCH: Final = 1_000
"""Events in one append at most."""
FOLD_BYTES: Final = 1024 * 1024
"""How much of the registry is folded at a time."""
AGAIN_S: Final = 5.0
"""When to put right again what could not be written."""


class _Headers(msgspec.Struct):
    operation: str


class _Value(msgspec.Struct, rename="camel"):
    """A stream as the registry tells of it."""

    path: str = ""
    content_type: str = ""
    created_at: int = 0


class _Event(msgspec.Struct, omit_defaults=True):
    type: str
    key: str
    headers: _Headers
    value: _Value | None = None


_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_encode = msgspec.json.Encoder().encode


class Registry:
    def __init__(self, engine: Engine, scheduler: Scheduler) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._events: list[_Event] = []
        self._timer: Timer | None = None
        self._is_off = False

    def start(self) -> None:
        """Create the registry if it is missing, put it right, and keep it so."""
        self._engine.unbounded.add(REGISTRY_NAME)
        self._engine.on_created.append(self._created)
        self._engine.on_deleted.append(self._deleted)
        self._put_right()

    def stop(self) -> None:
        self._is_off = True
        if self._timer is not None:
            self._timer.cancel()

    # -- streams come and go -----------------------------------------------------------------------------------------

    def _created(self, stream: LiveStream) -> None:
        if _is_listed(stream.name):
            self._tell(_told(stream, "insert"))

    def _deleted(self, stream: LiveStream) -> None:
        if _is_listed(stream.name):
            self._tell(_gone(stream.name))
        elif stream.name == REGISTRY_NAME:
            self._put_right_later(0.0)

    def _tell(self, event: _Event) -> None:
        """Append at the end of the tick: one append, however many streams came and went in it."""
        if not self._events:
            self._scheduler.soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        events, self._events = self._events, []
        if events and not self._is_off:
            self._append(events)

    def _append(self, events: list[_Event]) -> None:
        for batch in (events[start : start + BATCH] for start in range(0, len(events), BATCH)):
            try:
                self._engine.append(REGISTRY_NAME, JSON_MEDIA_TYPE, _encode(batch), None, None, False, self._appended)
            except Refusal as refusal:
                self._appended(refusal)
                return

    def _appended(self, result: object) -> None:
        if isinstance(result, Refusal):
            log.warning("the registry missed something: %s", result.detail)
            self._put_right_later(AGAIN_S)

    # -- putting right -----------------------------------------------------------------------------------------------

    def _put_right_later(self, delay_s: float) -> None:
        if self._timer is None and not self._is_off:
            self._timer = self._scheduler.later(delay_s, self._put_right)

    def _put_right(self) -> None:
        """Make the registry tell of exactly the streams there are."""
        self._timer = None
        if self._is_off:
            return
        registry = self._engine.catalog.by_name.get(REGISTRY_NAME)
        if registry is None:
            self._create()
            return
        if registry.deleted or registry.closed or not registry.type.json:
            log.warning("%s cannot be kept: it is closed, or deleted with forks, or no JSON stream", REGISTRY_NAME)
            return
        if registry.in_flight or self._events:
            # What is on its way would be told twice.
            self._put_right_later(AGAIN_S)
            return
        listed = self._fold(registry)
        events = []
        for name, stream in self._engine.catalog.by_name.items():
            if not stream.visible or stream.deleted or not _is_listed(name):
                continue
            value = listed.pop(name, None)
            if value is None:
                events.append(_told(stream, "insert"))
            elif value != _value(stream):
                events.append(_told(stream, "update"))
        self._append([_gone(name) for name in listed] + events)

    def _create(self) -> None:
        request = CreateRequest(REGISTRY_NAME, JSON_MEDIA_TYPE, None, None, False, b"")
        try:
            self._engine.create(request, self._recreated)
        except Refusal as refusal:
            self._recreated(refusal)

    def _recreated(self, result: object) -> None:
        if isinstance(result, Refusal):
            log.warning("the registry could not be created: %s", result.detail)
        # Looked at later rather than here: the creation is not yet visible to others.
        self._put_right_later(AGAIN_S if isinstance(result, Refusal) else 0.0)

    def _fold(self, registry: LiveStream) -> dict[str, _Value]:
        """What the registry lists. What clients wrote into it, and is no event of ours, is passed over."""
        listed: dict[str, _Value] = {}
        reader = self._engine.reader
        start = registry.retained
        while start.index < registry.durable_index:
            chunk = reader.chunk(registry, start, FOLD_BYTES)
            # Each message is stored with a comma behind it.
            for element in _elements(b"[" + b"".join(reader.buffers(chunk))[:-1] + b"]"):
                try:
                    event = _decode_event(element)
                except msgspec.DecodeError:
                    continue
                if event.type != EVENT_TYPE:
                    continue
                if event.headers.operation == "delete":
                    listed.pop(event.key, None)
                elif event.value is not None:
                    listed[event.key] = event.value
            start = chunk.end
        return listed


def _is_listed(name: str) -> bool:
    return name != REGISTRY_NAME and is_client_name(name)


def _value(stream: LiveStream) -> _Value:
    return _Value(stream.name, stream.type.header, stream.created_ms)


def _told(stream: LiveStream, operation: str) -> _Event:
    return _Event(EVENT_TYPE, stream.name, _Headers(operation), _value(stream))


def _gone(name: str) -> _Event:
    return _Event(EVENT_TYPE, name, _Headers("delete"))
