"""Settings for quotas: limits for each namespace."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from headwater.config.values import BytesOrOff, Count, SettingsSection, split, takes

_OVERRIDE = re.compile(
    r"(?P<namespace>[^\s=]+):(?P<limit>bytes|streams|readers|connections)=(?P<value>0|[1-9][0-9]{0,17})"
)


class QuotasSettings(SettingsSection):
    """Limits for each namespace: the first segment of a stream name that has several, or a bucket (`/ds/NAME`)."""

    max_bytes: BytesOrOff = Field(
        0, description="Message bytes of one namespace, without snapshots; an append beyond it is 413. 0: no limit."
    )
    max_streams: Count = Field(
        0, ge=0, le=2**40, description="Streams of one namespace; a create beyond it is 413. 0: no limit."
    )
    max_readers: Count = Field(
        0,
        ge=0,
        le=2**40,
        description="Live readers of one namespace, each with a connection; more get 429 with `Retry-After`."
        " 0: no limit.",
    )
    max_connections: Count = Field(
        0,
        ge=0,
        le=2**40,
        description="Connections that serve a request of one namespace at the same time: live reads, and reads and"
        " writes whose response is not complete; more get 429 with `Retry-After`. 0: no limit.",
    )
    namespaces: str = Field(
        "",
        description="Other limits for some namespaces, comma-separated; they replace the ones above. These namespaces"
        " have metrics.",
        json_schema_extra=takes("a comma-separated list like tenant-a:bytes=1000000, /ds/rooms:readers=5"),
    )

    @field_validator("namespaces")
    @classmethod
    def _check_namespaces(cls, value: str) -> str:
        for entry in split(value):
            if _OVERRIDE.fullmatch(entry) is None:
                raise ValueError(
                    f"{entry!r} is not NAMESPACE:LIMIT=N, where LIMIT is bytes, streams, readers or connections"
                )
        return value

    @property
    def overrides(self) -> dict[str, dict[str, int]]:
        """The limits of `namespaces`, by namespace and name."""
        found: dict[str, dict[str, int]] = {}
        for entry in split(self.namespaces):
            match = _OVERRIDE.fullmatch(entry)
            assert match is not None
            found.setdefault(match["namespace"], {})[match["limit"]] = int(match["value"])
        return found
