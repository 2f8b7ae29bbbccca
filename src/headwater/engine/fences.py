"""Fenced streams: check that a write belongs to the current claim, bind producer ids, and seal generations.

The state of a fence is a document beside its stream. It is queued before the record that it belongs to, so that a crash
between the two never removes a fence. The check runs in the same step as the append, against the current state of the
subscription (proposal for the protocol, see `core.fencing`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple, Protocol

from headwater.core.catalog import Catalog
from headwater.core.errors import ConfigMismatch, FencingUnavailable, InvalidProducer, TooManyProducers
from headwater.core.fencing import (
    BOUND_MAX,
    TOKEN_PREFIX,
    FenceState,
    WriteClaim,
    WriteCredentials,
    decode_fence,
    encode_fence,
    fenced,
    is_wake_token,
)
from headwater.core.producers import ProducerHeaders
from headwater.core.records import Append
from headwater.core.rules import CreateRequest
from headwater.core.subscription_errors import TokenOutOfScope
from headwater.engine.stream import LiveStream
from headwater.engine.stream_host import DocumentWriter

FENCE_PREFIX: Final = "fence/"


class ClaimState(NamedTuple):
    """The current claim of a subscription."""

    authority: str
    generation: int
    wake_id: str
    holder: str
    is_live: bool
    """Whether a worker holds it or a webhook is being called, and the lease has not expired."""
    streams: Collection[str]


class ClaimSource(Protocol):
    """The part of subscriptions that fences use."""

    def read_write_token(self, text: str) -> WriteClaim:
        """The claim of a token. Raises `TokenInvalid`."""

    def claim_state(self, subscription_id: str) -> ClaimState | None: ...


class ClaimFences(Protocol):
    """The fences of all streams that claims can write to, as subscriptions need them."""

    claims: ClaimSource | None

    def has_any(self, names: Collection[str]) -> bool: ...

    def seal(self, names: Collection[str], authority: str, generation: int) -> None: ...


class FenceHost(DocumentWriter, Protocol):
    """The part of the engine that fences use."""

    catalog: Catalog[LiveStream]


class Fences:
    def __init__(self, engine: FenceHost) -> None:
        self._engine = engine
        self.streams: dict[int, FenceState] = {}
        """The fenced streams, by incarnation. Empty on a server that does not use them."""
        self.claims: ClaimSource | None = None
        """Without it, no stream can be fenced."""

    def start(self) -> None:
        for key, value in list(self._engine.catalog.documents.items()):
            if key.startswith(FENCE_PREFIX):
                stream_id = int(key.removeprefix(FENCE_PREFIX), 16)
                if stream_id in self._engine.catalog.by_id:
                    self.streams[stream_id] = decode_fence(value)
                else:
                    self._engine.put_document(key, None, None, None)

    # -- streams -----------------------------------------------------------------------------------------------------

    def check_same(self, stream: LiveStream, request: CreateRequest) -> None:
        """Refuse a PUT of an existing stream with a different `Write-Fence` (WF-01)."""
        if request.fenced != (stream.id in self.streams):
            raise ConfigMismatch(
                f"The stream exists {'without' if request.fenced else 'with'} Write-Fence: true. Use it as it is,"
                " delete"
                " it first, or choose another name."
            )

    def create(self, stream_id: int) -> None:
        if self.claims is None:
            raise FencingUnavailable(
                "Write-Fence needs subscriptions, which are disabled on this server; create the stream without it."
            )
        self.streams[stream_id] = FenceState()
        self._save(stream_id)

    def ended(self, stream_ids: Iterable[int]) -> None:
        for stream_id in stream_ids:
            if self.streams.pop(stream_id, None) is not None:
                self._engine.put_document(fence_key(stream_id), None, None, None)

    # -- appends -----------------------------------------------------------------------------------------------------

    def check(
        self, stream: LiveStream, producer: ProducerHeaders | None, credentials: WriteCredentials | None
    ) -> WriteClaim | None:
        """Check a write: returns its claim, or None for a write without a token; raises if it may not write."""
        fence = self.streams.get(stream.id)
        if fence is None:
            return None
        if credentials is not None and credentials.is_bearer and not credentials.text.startswith(TOKEN_PREFIX):
            if is_wake_token(credentials.text):
                raise TokenOutOfScope(
                    "This is the token of a wake; claim the work, and send the write_token of the claim."
                )
            credentials = None
        if credentials is None:
            if producer is not None and producer.id in fence.bound:
                raise fenced("bound", "Only the holder of the claim may use this Producer-Id.", producer)
            return None
        assert self.claims is not None, "there are no fenced streams without subscriptions"
        claim = self.claims.read_write_token(credentials.text)
        now = self.claims.claim_state(claim.subscription)
        # The seal of a removed link is kept: its claim gets 409, not 403.
        is_sealed = fence.seals.get(claim.authority, -1) >= claim.generation
        if now is not None and now.authority == claim.authority and stream.name not in now.streams and not is_sealed:
            raise TokenOutOfScope(
                f"The write token is not for stream {stream.name!r}; link the stream to subscription"
                f" {claim.subscription!r} first."
            )
        if producer is None:
            raise InvalidProducer("A fenced write needs Producer-Id, Producer-Epoch and Producer-Seq; send all three.")
        self._check_current(fence, claim, now, producer)
        return claim

    def _check_current(
        self, fence: FenceState, claim: WriteClaim, now: ClaimState | None, producer: ProducerHeaders
    ) -> None:
        if now is not None and now.authority != claim.authority:
            now = None
        generation = now.generation if now is not None else None
        holder = now.holder if now is not None and now.is_live else ""
        if fence.seals.get(claim.authority, -1) >= claim.generation:
            raise fenced("sealed", "The claim has ended; its generation is sealed.", producer, generation, holder)
        held = (now.generation, now.wake_id, now.holder) if now is not None and now.is_live else None
        if held != (claim.generation, claim.wake_id, claim.holder):
            raise fenced("marker", "The claim of the write token is not the current one.", producer, generation, holder)
        if producer.epoch != claim.generation:
            detail = f"Producer-Epoch must be the generation of the claim, {claim.generation}."
            raise fenced("epoch", detail, producer, generation, holder)

    def accept(self, stream: LiveStream, record: Append) -> None:
        """Record a fenced write that is about to be stored, and bind its producer."""
        fence = self.streams[stream.id]
        if record.producer_id is not None and record.producer_id not in fence.bound:
            if len(fence.bound) >= BOUND_MAX:
                raise TooManyProducers(
                    f"A fenced stream binds at most {BOUND_MAX} producer ids; use one of them again."
                )
            fence.bound = [*fence.bound, record.producer_id]
        end = record.message_index + len(record.lengths), record.byte_position + len(record.payload)
        fence.written = end
        self._save(stream.id)

    # -- claims ------------------------------------------------------------------------------------------------------

    def has_any(self, names: Collection[str]) -> bool:
        """Whether one of these streams is fenced."""
        return any(stream.name in names for stream in self._existing())

    def seal(self, names: Collection[str], authority: str, generation: int) -> None:
        """Seal a generation on all its streams, before its claim ends. Idempotent (WF-22)."""
        for stream in self._existing():
            fence = self.streams[stream.id]
            if stream.name not in names or fence.seals.get(authority, -1) >= generation:
                continue
            tail = stream.message_index, stream.byte_position
            fence.seals = {**fence.seals, authority: generation}
            fence.sealed_generation = generation
            fence.sealed_at = min(fence.written, tail) if fence.written is not None else tail
            self._save(stream.id)

    def _existing(self) -> Iterable[LiveStream]:
        by_id = self._engine.catalog.by_id
        return (by_id[stream_id] for stream_id in self.streams if stream_id in by_id)

    def _save(self, stream_id: int) -> None:
        self._engine.put_document(fence_key(stream_id), encode_fence(self.streams[stream_id]), None, None)


def fence_key(stream_id: int) -> str:
    return f"{FENCE_PREFIX}{stream_id:016x}"
