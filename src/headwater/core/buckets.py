"""Buckets: the identifiers of the `/ds/` API, and the names under which its streams are stored.

A stream of a bucket is stored under its canonical path, `/ds/{bucket_id}/{stream_id}`. Names of the base surface never
begin with a slash (`core.names` refuses empty segments), so the two surfaces cannot reach each other's streams by
any spelling. A bucket itself is a document (extensions §1).
"""

from __future__ import annotations

import re
from typing import Final

from headwater.core.errors import BadRequest, InvalidName

BUCKET_ROOT: Final = "/ds/"
LISTING_ID: Final = "streams"
"""The stream id that is reserved for the listing of a bucket (§1.1)."""
KEY_MAX_BYTES: Final = 122
"""Bytes of `{bucket_id}/{stream_id}` (§1.1)."""
PAGE_MAX: Final = 1000
"""Entries of one page of a listing."""

_BUCKET_ID: Final = re.compile(r"[a-z0-9_-]{4,64}", re.ASCII)
_CONTROL: Final = re.compile("[\0-\x1f\x7f-\x9f]")
_LIMIT: Final = re.compile(r"[1-9][0-9]{0,3}", re.ASCII)
_DOCUMENT_ROOT: Final = "bucket/"


def check_bucket_id(bucket_id: str) -> str:
    if _BUCKET_ID.fullmatch(bucket_id) is None:
        raise InvalidName(f"Bucket id {bucket_id!r} is not valid; use 4 to 64 characters out of a-z, 0-9, _ and -.")
    return bucket_id


def check_stream_id(bucket_id: str, stream_id: str) -> str:
    """Check a percent-decoded stream id of this bucket and return it."""
    if not stream_id:
        raise InvalidName("The stream id is empty; name the stream as in /ds/{bucket}/{stream}.")
    if "/" in stream_id or "\0" in stream_id or ".." in stream_id:
        raise InvalidName(
            f"Stream id {stream_id!r} is not valid; it may not contain a slash, a NUL or two dots in a row."
        )
    if stream_id == ".":
        # A proxy that normalises the URL would turn it into the URL of the bucket.
        raise InvalidName("A stream id may not be a single dot; choose another one.")
    if len(bucket_id) + 1 + len(stream_id.encode("utf-8")) > KEY_MAX_BYTES:
        raise InvalidName(
            f"The stream id is too long; with its bucket id and a slash it may have {KEY_MAX_BYTES} bytes in UTF-8."
        )
    if stream_id == LISTING_ID:
        raise InvalidName(
            f"The stream id {LISTING_ID!r} is reserved for the listing of the bucket; choose another one."
        )
    return stream_id


def check_new_name(name: str) -> None:
    """Refuse control characters in the name of a stream that is to be created. Streams that have one stay usable:
    earlier releases allowed it."""
    if _CONTROL.search(name) is not None:
        raise InvalidName(
            f"Stream name {name!r} has a control character (U+0000 to U+001F, U+007F to U+009F); remove it."
        )


def check_page_limit(text: str | None) -> int:
    """Parse the `limit` of a listing (§1.4)."""
    if text is None:
        return PAGE_MAX
    if _LIMIT.fullmatch(text) is None or int(text) > PAGE_MAX:
        raise BadRequest(f"limit must be a whole number from 1 to {PAGE_MAX}, not {text!r}.")
    return int(text)


def stream_name(bucket_id: str, stream_id: str) -> str:
    """The name under which a stream of a bucket is stored."""
    return f"{BUCKET_ROOT}{bucket_id}/{stream_id}"


def is_bucketed(name: str) -> bool:
    return name.startswith(BUCKET_ROOT)


def ids_of(name: str) -> tuple[str, str]:
    """Bucket id and stream id of a name that `is_bucketed`."""
    bucket_id, _, stream_id = name[len(BUCKET_ROOT) :].partition("/")
    return bucket_id, stream_id


def document_key(bucket_id: str) -> str:
    return _DOCUMENT_ROOT + bucket_id


def bucket_of_document(key: str) -> str | None:
    """The bucket that a document describes, or None if it is another kind of document."""
    return key[len(_DOCUMENT_ROOT) :] if key.startswith(_DOCUMENT_ROOT) else None
