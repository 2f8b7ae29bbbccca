"""Writer leases: the terms that a writer must renew, and what happens to its stream otherwise (extension)."""

from __future__ import annotations

from typing import Final

import msgspec

from headwater.core.content import split_json
from headwater.core.errors import InvalidLease, PayloadTooLarge
from headwater.core.producers import ID_MAX_BYTES

TTL_MIN_MS: Final = 1_000
HOLDER_MAX_CHARS: Final = 256
"""Length of the name of a lease's holder."""
FINAL_MAX_BYTES: Final = 65_536
"""Size of the message that ends a stream: an error event, not data."""


class LeaseTerms(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who holds a lease, for how long it lasts without renewal, and how the stream ends after that."""

    holder: str
    ttl_ms: int
    final: bytes = b""
    """The last message, as a request body; empty: none."""
    close: bool = True
    producer_id: str | None = None
    """The holder's producer, which is fenced when the lease expires."""
    epoch: int | None = None
    """The epoch that fences it, set when the lease expires, so that a repetition after a crash uses the same one."""


encode_terms: Final = msgspec.json.Encoder().encode
decode_terms: Final = msgspec.json.Decoder(LeaseTerms).decode


def check_holder(holder: str) -> str:
    if not holder or len(holder) > HOLDER_MAX_CHARS or not holder.isprintable():
        raise InvalidLease(f"holder must have 1 to {HOLDER_MAX_CHARS} printable characters, not {holder[:100]!r}.")
    return holder


def check_terms(terms: LeaseTerms, ttl_max_ms: int) -> None:
    """Refuse terms that could not be carried out."""
    check_holder(terms.holder)
    if not TTL_MIN_MS <= terms.ttl_ms <= ttl_max_ms:
        raise InvalidLease(f"ttl_ms must be from {TTL_MIN_MS} to {ttl_max_ms}, not {terms.ttl_ms}.")
    producer_id = terms.producer_id
    if producer_id is not None and not 0 < len(producer_id.encode("utf-8", "surrogatepass")) <= ID_MAX_BYTES:
        raise InvalidLease(f"producer_id must have 1 to {ID_MAX_BYTES} bytes.")
    if not terms.close:
        if not terms.final:
            raise InvalidLease(
                "A lease that neither closes the stream nor appends to it has no effect; set close or append."
            )
        if terms.producer_id is None:
            raise InvalidLease("A lease that does not close the stream fences its holder; send its producer_id too.")


def final_body(message: msgspec.Raw | None, *, json: bool) -> bytes:
    """The last message of a lease as a request body: any value for a JSON stream, text for others."""
    if message is None or not bytes(message):
        return b""
    raw = bytes(message)
    if len(raw) > FINAL_MAX_BYTES:
        raise PayloadTooLarge(f"append has {len(raw)} bytes; the last message of a lease may have {FINAL_MAX_BYTES}.")
    if json:
        body = b"[" + raw + b"]"
        split_json(body)
        return body
    try:
        text = msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidLease("append must be a string, because the stream is not a JSON stream.") from None
    if not text:
        raise InvalidLease("append must not be empty; leave it out, or give the last message of the stream.")
    return text.encode()
