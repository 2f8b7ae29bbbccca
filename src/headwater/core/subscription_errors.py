"""Errors of the subscription API: codes in the spelling of the protocol, with additional members in the body."""

from __future__ import annotations

from typing import ClassVar

from headwater.core.errors import Refusal


class SubscriptionRefusal(Refusal):
    """A rejected request of the subscription API."""

    code = "INVALID_REQUEST"
    retry_after_s: ClassVar[int] = 0
    """Sent as `Retry-After`, unless it is 0."""

    def __init__(self, detail: str, **members: str | int) -> None:
        super().__init__(detail, (("Retry-After", str(self.retry_after_s)),) if self.retry_after_s else ())
        self.members = members


class InvalidSubscription(SubscriptionRefusal):
    """The body or a parameter of a subscription request is invalid.

    Read `detail`, and correct the request.
    """


class TooManyStreams(SubscriptionRefusal):
    """A subscription or a request names more streams than the settings allow.

    Split the request, or raise `subscriptions.max_streams_per_request` or
    `subscriptions.max_links_per_subscription`.
    """

    status = 413
    code = "TOO_MANY_STREAMS"


class SubscriptionLimitReached(SubscriptionRefusal):
    """The server has reached its limit of subscriptions, links or pattern segments.

    Delete subscriptions, raise `subscriptions.max_…`, or retry after `Retry-After` seconds.
    """

    status = 503
    code = "SUBSCRIPTION_LIMIT_REACHED"
    retry_after_s = 60


class SubscriptionBusy(SubscriptionRefusal):
    """Too many requests wait for the same subscription to be created or deleted.

    Retry after `Retry-After` seconds.
    """

    status = 503
    code = "SUBSCRIPTION_BUSY"
    retry_after_s = 1


class WebhookUrlRejected(SubscriptionRefusal):
    """The webhook URL is not a public https address.

    Use such an address; for local receivers set `subscriptions.allow_local_webhooks`.
    """

    code = "WEBHOOK_URL_REJECTED"


class TokenInvalid(SubscriptionRefusal):
    """The token of the worker is missing, malformed, or belongs to another wake.

    Use the token of the wake that the worker received.
    """

    status = 401
    code = "TOKEN_INVALID"


class TokenOutOfScope(SubscriptionRefusal):
    """The token is valid, but not for writing to this stream.

    Send the write token of a claim whose subscription is linked to the stream.
    """

    status = 403
    code = "TOKEN_OUT_OF_SCOPE"


class SubscriptionNotFound(SubscriptionRefusal):
    """There is no subscription with this id.

    Create it with PUT.
    """

    status = 404
    code = "SUBSCRIPTION_NOT_FOUND"


class SubscriptionAlreadyExists(SubscriptionRefusal):
    """A subscription with this id exists with another configuration.

    Use it, delete it first, or choose another id.
    """

    status = 409
    code = "SUBSCRIPTION_ALREADY_EXISTS"


class AlreadyClaimed(SubscriptionRefusal):
    """Another worker holds the lease of this subscription.

    Wait for the next wake, or until the lease expires.
    """

    status = 409
    code = "ALREADY_CLAIMED"


class NoPendingWork(SubscriptionRefusal):
    """The subscription has nothing to do.

    Wait for the next wake.
    """

    status = 409
    code = "NO_PENDING_WORK"


class Fenced(SubscriptionRefusal):
    """The wake of this worker has ended; another worker may have taken over.

    Stop, and claim the next wake.
    """

    status = 409
    code = "FENCED"


class InvalidAck(SubscriptionRefusal):
    """An acknowledged offset is not valid for its stream, or is beyond its end.

    Acknowledge offsets that the wake or a read returned.
    """

    status = 409
    code = "INVALID_OFFSET"
