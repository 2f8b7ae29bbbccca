"""Settings for subscriptions: webhooks and limits."""

from __future__ import annotations

from pydantic import Field, field_validator

from headwater.config.values import AgeOrOff, Count, OptionalBool, Seconds, SettingsSection, check_web_origin, takes


class SubscriptionsSettings(SettingsSection):
    """Durable cursors that wake workers."""

    enabled: bool = Field(True, description="Serve `/v1/stream/__ds/…`.")
    allow_local_webhooks: OptionalBool = Field(
        False,
        description="Allow webhooks to `http://localhost` and 127.0.0.0/8. For development only: anyone who can create"
        " a subscription, even through a proxy, can then make the server POST to any port of this machine.",
        json_schema_extra=takes("true or false; empty is false"),
    )
    public_url: str = Field(
        "",
        description="URL of this server for webhook receivers. Empty: the URL that the creator of the subscription"
        " used.",
        json_schema_extra=takes("empty, or a URL like https://streams.example.com"),
    )
    key_rotation_secs: AgeOrOff = Field(
        0.0, description="Age at which the key that signs webhooks is replaced; 0: never."
    )
    webhook_timeout_secs: Seconds = Field(30.0, description="Maximum duration of a webhook call.")
    webhook_concurrency: Count = Field(
        64,
        ge=1,
        le=4096,
        description="Maximum number of concurrent webhook calls. Receivers that do not respond get a quarter of them.",
    )
    webhook_concurrency_per_host: Count = Field(
        8,
        ge=1,
        le=4096,
        description="Concurrent webhook calls to one host and port; only one until it has responded to a call quickly.",
    )

    max_subscriptions: Count = Field(
        10_000, ge=1, le=10_000_000, description="Maximum number of subscriptions; more get 503."
    )
    max_links: Count = Field(
        250_000,
        ge=1,
        le=100_000_000,
        description="Maximum number of streams that all subscriptions together follow, about 0.4 KB of memory each."
        " More get 503; new streams that match a pattern are linked later, from their beginning, when there is room.",
    )
    max_links_per_subscription: Count = Field(
        100_000,
        ge=1,
        le=100_000_000,
        description="Maximum number of streams that one subscription follows; more get 413, or are linked later as"
        " above.",
    )
    max_streams_per_request: Count = Field(
        1_000,
        ge=1_000,
        le=1_000_000,
        description="Maximum number of streams in one request to link or to ack; more get 413. A wake reports up to"
        " 1000.",
    )
    max_pattern_segments: Count = Field(
        30_000,
        ge=1,
        le=10_000_000,
        description="Maximum number of segments of all patterns together; more get 503. It limits the time that"
        " creating a stream takes, about 1 ms per 1000 segments at worst.",
    )
    max_description_chars: Count = Field(
        4_096,
        ge=0,
        le=1_000_000,
        description="Maximum length of the `description` of a subscription, in characters; longer is 400.",
    )
    max_waiting_requests: Count = Field(
        100,
        ge=1,
        le=1_000_000,
        description="Maximum number of requests that wait for one subscription to be created or removed; more get 503.",
    )

    @field_validator("public_url")
    @classmethod
    def _check_public_url(cls, value: str) -> str:
        return check_web_origin(value)
