"""One event stream over many streams: a POST lists them, and a GET of the returned id follows them (extension).

`follow_sessions` has the sessions, `followed_events` the events, and `engine.multi_stream_follow` the cursors on the
streams.
"""

from __future__ import annotations

import logging
import re
from typing import Annotated, Final, Literal

import msgspec

from headwater.core.errors import BadRequest, TooManyFollowed
from headwater.core.names import check_name
from headwater.core.offsets import BEGINNING
from headwater.engine.multi_stream_follow import FollowRequest
from headwater.http.context import Context
from headwater.http.deadlines import Deadline
from headwater.http.follow_sessions import GONE, IDLE_S, FollowSession
from headwater.http.followed_events import EncodedEvent, FollowedEvents, encoded_problem
from headwater.http.headers import CREATED, JSON_TYPE, NO_CACHE, NO_STORE, header
from headwater.http.json_bodies import json_response, read_json
from headwater.http.paths import Address, stream_at
from headwater.http.request import Request
from headwater.http.responses import Channel, Response
from headwater.http.scopes import Scope
from headwater.http.sse_encoding import data_event, id_line

log = logging.getLogger("headwater.http")

NAMES_MAX: Final = 10_000
"""Streams that one request can list: they are checked at once, in about 20 ms. A prefix can have more."""
OFFSET_MAX_CHARS: Final = 50
"""Length of an offset in a request to follow: no valid one is longer, and the session keeps it."""
_EVENT_ID: Final = re.compile(r"[0-9]{1,18}", re.ASCII)
_HEADERS: Final = NO_CACHE + b"Content-Type: text/event-stream\r\n"


class _FollowBody(msgspec.Struct):
    streams: dict[str, Annotated[str, msgspec.Meta(max_length=OFFSET_MAX_CHARS)]] = {}
    prefix: str | None = None
    start: Literal["-1", "now"] = BEGINNING


_bodies: Final = msgspec.json.Decoder(_FollowBody)


def begin(context: Context, request: Request, address: Address) -> Response:
    """Create a session for the listed streams; the response has its id, and the URL of the events."""
    body = read_json(request, _bodies, BadRequest)
    if len(body.streams) > NAMES_MAX:
        raise TooManyFollowed(
            f"One request can name {NAMES_MAX} streams, not {len(body.streams)}; follow a prefix, or send several."
        )
    scope = Scope.of(request)
    offsets = {_checked(context, scope, name): offset for name, offset in body.streams.items()}
    if body.prefix is not None:
        _check_length(context, body.prefix)
        scope.check_prefix(body.prefix)
    elif not offsets:
        raise BadRequest("The request follows nothing; name streams with their offsets in `streams`, or a `prefix`.")
    now_s = context.loop.time()
    session = context.follow_sessions.add(FollowRequest(offsets, body.prefix, body.start), scope, now_s)
    location = context.location(request).decode("latin-1") + f"/{session.id}"
    answer = {"id": session.id, "url": location, "expires_in_ms": round(IDLE_S * 1000)}
    return json_response(CREATED, answer, NO_STORE + JSON_TYPE + header("Location", location))


def _check_length(context: Context, prefix: str) -> None:
    """Refuse a prefix that no name can have: the session would keep it."""
    limit = context.limits.max_name_bytes
    if len(prefix.encode("utf-8", "surrogatepass")) > limit:
        raise BadRequest(f"The prefix is longer than any name: {limit} bytes (limits.max_name_bytes); shorten it.")


def _checked(context: Context, scope: Scope, name: str) -> str:
    limit = context.limits.max_name_bytes
    if name.startswith("/"):
        return scope.check_name(stream_at(name.encode("utf-8", "surrogatepass"), limit, context.root_aliases))
    return scope.check_name(check_name(name, limit))


def events(context: Context, request: Request, address: Address) -> FollowEvents:
    session = context.follow_sessions.find(address.subscription, Scope.of(request), context.loop.time())
    last = request.header(b"last-event-id") or "0"
    if _EVENT_ID.fullmatch(last) is None:
        raise BadRequest(f"Last-Event-ID must be a number that this server sent, not {last[:100]!r}.")
    if session.reader is not None:
        # The client has reconnected before the server noticed the lost connection.
        session.reader.end()
    return FollowEvents(context, session, session.resume_after(int(last)))


class FollowEvents:
    """The events of one session, on one connection."""

    def __init__(self, context: Context, session: FollowSession, wanted: FollowRequest) -> None:
        self._context = context
        self._session = session
        self._wanted = wanted
        self._events: FollowedEvents | None = None
        self._channel: Channel | None = None
        self._deadline: Deadline | None = None
        self._was_up_to_date = False

    def start(self, channel: Channel) -> None:
        context = self._context
        self._channel = channel
        if context.sse_deadlines is not None:
            self._deadline = context.sse_deadlines.set(self.end)
        context.metrics.followers["many"] += 1
        channel.begin_body(_HEADERS)
        context.follow_sessions.attach(self._session, self)
        self._events = context.open_events(self._wanted, self._session.scope, self._pump)
        self._events.start()

    def on_writable(self) -> None:
        self._pump()

    def on_drain(self) -> None:
        self.end()

    def on_disconnect(self) -> None:
        self._leave()

    def end(self) -> None:
        channel = self._leave()
        if channel is not None:
            channel.end_body()

    def _pump(self) -> None:
        try:
            self._send()
        except Exception:
            log.exception("an event stream over many streams failed")
            self.end()

    def _send(self) -> None:
        events = self._events
        while self._channel is not None and events is not None and self._channel.writable:
            if events.failure is not None:
                self._channel.write(_problem(encoded_problem("", events.failure)))
                self.end()
                return
            event = events.next_event()
            if event is None:
                if events.is_complete and not self._was_up_to_date:
                    self._was_up_to_date = True
                    self._session.mark_listed()
                    self._channel.write(b'event: control\ndata:{"upToDate":true}\n\n')
                if events.has_ended:
                    self.end()
                return
            if not event.data:
                self._session.began(event.name, event.offset)
            elif event.name:
                number = self._session.sent(event.name, event.offset)
                self._channel.write(b"%b%b\n" % (data_event(event.data)[:-1], id_line(str(number))))
            elif event.gone and not self._session.names(event.gone):
                number = self._session.sent(event.gone, GONE)
                self._channel.write(b"%b%b\n" % (_problem(event)[:-1], id_line(str(number))))
            else:
                self._channel.write(_problem(event))

    def _leave(self) -> Channel | None:
        channel, self._channel = self._channel, None
        if channel is not None:
            if self._deadline is not None:
                self._deadline.cancel()
            if self._events is not None:
                self._events.close()
            self._context.metrics.followers["many"] -= 1
            self._context.follow_sessions.detach(self._session, self, self._context.loop.time())
        return channel


def _problem(event: EncodedEvent) -> bytes:
    return b"event: problem\ndata:%b\n\n" % event.data
