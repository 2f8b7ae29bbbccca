"""The route table: every method at every path pattern, its handler, and its operation name in metrics."""

from __future__ import annotations

from functools import partial
from typing import Final

from headwater.core.buckets import LISTING_ID, check_stream_id
from headwater.engine.buckets import bucket_not_found
from headwater.http import (
    append,
    bootstrap,
    buckets,
    claims,
    cluster,
    create,
    delete,
    follow,
    health,
    key_set,
    leases,
    long_poll,
    metadata,
    metrics,
    options,
    paths,
    read,
    snapshots,
    sse,
    stream_listing,
    subscriptions,
    ui,
)
from headwater.http.context import Context
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import AnyResponse, Deferred, Response
from headwater.http.routing import LEASE, Handler, Route


def in_bucket(handler: Handler) -> Handler:
    """Wrap a handler: 404 if the bucket does not exist (extensions §1.6)."""

    def handle(context: Context, request: Request, address: Address) -> AnyResponse:
        if context.engine.buckets.exists(address.bucket):
            return handler(context, request, address)
        refusal = bucket_not_found(address.bucket)
        return Deferred(partial(_after_all_pending, context, refusal), _never_rendered, "no_bucket")

    return handle


def _after_all_pending(context: Context, result: object, done: object) -> None:
    context.engine.after_all_pending(done, result)  # type: ignore[arg-type]


def _never_rendered(result: object) -> Response:
    raise AssertionError("refusals are not rendered")


def _reserved(context: Context, request: Request, address: Address) -> AnyResponse:
    """Refuse the stream id `streams`, which is the listing of a bucket."""
    check_stream_id(address.bucket, LISTING_ID)
    raise AssertionError("the id is reserved")


def _both(pattern: str, handler: Handler, operation: str) -> tuple[Route, Route]:
    return Route("GET", pattern, handler, operation), Route("HEAD", pattern, handler, operation)


_TABLE: Final[tuple[Route, ...]] = (
    Route("PUT", paths.STREAM, create.handle, "create"),
    Route("POST", paths.STREAM, append.handle, "append"),
    Route("GET", paths.STREAM, read.handle, "read", standby_may_answer=True),
    Route("GET", paths.STREAM, long_poll.handle, "long-poll", live="long-poll", standby_may_answer=True),
    Route("GET", paths.STREAM, sse.handle, "sse", live="sse", standby_may_answer=True),
    Route("POST", paths.STREAM, leases.change, "lease", live=LEASE),
    Route("GET", paths.STREAM, leases.show, "lease", live=LEASE),
    Route("HEAD", paths.STREAM, metadata.handle, "head", standby_may_answer=True),
    Route("DELETE", paths.STREAM, delete.handle, "delete"),
    *_both(paths.STREAM_LISTING, stream_listing.index, "list_streams"),
    Route("GET", paths.STREAM_LISTING, stream_listing.changes, "list_changes", live="long-poll"),
    Route("POST", paths.FOLLOW, follow.begin, "follow"),
    Route("GET", paths.FOLLOW_EVENTS, follow.events, "follow_events"),
    *_both(paths.CLUSTER, cluster.handle, "cluster"),
    *_both(paths.KEY_SET, key_set.handle, "jwks"),
    *_both(paths.SUBSCRIPTIONS, subscriptions.index, "subscription-list"),
    Route("PUT", paths.SUBSCRIPTION, subscriptions.put, "subscription-put"),
    *_both(paths.SUBSCRIPTION, subscriptions.get, "subscription-get"),
    Route("DELETE", paths.SUBSCRIPTION, subscriptions.delete, "subscription-delete"),
    Route("POST", paths.SUBSCRIPTION_STREAMS, subscriptions.add_streams, "subscription-link"),
    Route("DELETE", paths.SUBSCRIPTION_STREAM, subscriptions.remove_stream, "subscription-unlink"),
    Route("POST", paths.CLAIM, claims.claim, "claim"),
    Route("POST", paths.ACK, claims.ack, "ack"),
    Route("POST", paths.RELEASE, claims.release, "release"),
    Route("POST", paths.CALLBACK, claims.call_back, "callback"),
    *_both(paths.BUCKETS, buckets.index, "list_buckets"),
    Route("PUT", paths.BUCKET, buckets.create, "create_bucket"),
    *_both(paths.BUCKET, buckets.show, "show_bucket"),
    Route("DELETE", paths.BUCKET, buckets.delete, "delete_bucket"),
    *_both(paths.BUCKET_LISTING, buckets.listing, "list_bucket"),
    Route("GET", paths.BUCKET_LISTING, in_bucket(stream_listing.bucket_changes), "list_changes", live="long-poll"),
    Route("PUT", paths.BUCKET_LISTING, _reserved, "create"),
    Route("POST", paths.BUCKET_LISTING, _reserved, "append"),
    Route("DELETE", paths.BUCKET_LISTING, _reserved, "delete"),
    Route("PUT", paths.BUCKET_STREAM, in_bucket(create.handle), "create"),
    Route("POST", paths.BUCKET_STREAM, in_bucket(append.handle), "append"),
    Route("GET", paths.BUCKET_STREAM, in_bucket(read.handle), "read"),
    Route("GET", paths.BUCKET_STREAM, in_bucket(long_poll.handle), "long-poll", live="long-poll"),
    Route("GET", paths.BUCKET_STREAM, in_bucket(sse.handle), "sse", live="sse"),
    Route("POST", paths.BUCKET_STREAM, in_bucket(leases.change), "lease", live=LEASE),
    Route("GET", paths.BUCKET_STREAM, in_bucket(leases.show), "lease", live=LEASE),
    Route("HEAD", paths.BUCKET_STREAM, in_bucket(metadata.handle), "head"),
    Route("DELETE", paths.BUCKET_STREAM, in_bucket(delete.handle), "delete"),
    *_both(paths.LATEST_SNAPSHOT, in_bucket(snapshots.latest), "latest_snapshot"),
    Route(
        "PUT",
        paths.SNAPSHOT,
        in_bucket(snapshots.publish),
        "publish_snapshot",
        begin_upload=snapshots.begin_upload,
    ),
    *_both(paths.SNAPSHOT, in_bucket(snapshots.read), "read_snapshot"),
    Route("DELETE", paths.SNAPSHOT, in_bucket(snapshots.delete), "delete_snapshot"),
    *_both(paths.BOOTSTRAP, in_bucket(bootstrap.handle), "bootstrap"),
    *_both(paths.HEALTH, health.health, "health"),
    *_both(paths.READY, health.ready, "ready"),
    *_both(paths.METRICS, metrics.handle, "metrics"),
    *_both(paths.UI, ui.handle, "ui"),
)

ROUTES: Final[tuple[Route, ...]] = (
    *_TABLE,
    *(
        Route("OPTIONS", pattern, options.handle, "options")
        for pattern in (paths.SERVER, *dict.fromkeys(route.pattern for route in _TABLE))
    ),
)
"""Every route; OPTIONS is allowed at every pattern."""
