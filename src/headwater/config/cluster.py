"""The settings of a node of a cluster (`storage.mode = "cluster"`)."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from headwater.config.values import Count, OptionalPath, Seconds, SettingsSection, takes

SECRET_MIN_LENGTH = 16


class ClusterSettings(SettingsSection):
    """Several nodes as one server (`storage.mode = "cluster"`)."""

    postgres_url: str = Field(
        "",
        description="The database with the journal, as `postgresql://user@host1,host2/name`; the host that accepts"
        " writes is used. Its servers must replicate synchronously.",
    )
    secret: str = Field(
        "",
        description="Shared secret with which nodes authenticate to each other; the same on all nodes.",
        json_schema_extra=takes("a text of at least 16 characters"),
    )
    name: str = Field(
        "headwater", min_length=1, description="The name of the cluster. A database of another one is refused."
    )
    node: str = Field("", description="The name of this node, different on each. Empty: host name and port.")
    shards: Count = Field(
        16, ge=1, le=256, description="Shards of a new cluster, each one process. Fixed when it is created."
    )
    host: str = Field(
        "",
        description="The address of this node for the others. Empty: `server.host`, or the machine's host name if the"
        " server listens on all addresses.",
    )
    peer_port: Count = Field(
        0,
        ge=0,
        le=65_000,
        description="First port for the other nodes: shard N listens on this port plus N. 0 picks free ones.",
    )
    tls_cert_path: OptionalPath = Field(
        None,
        description="PEM certificate chain of this node for connections between nodes, in both roles (client and"
        " server). Set together with `tls_key_path` and `tls_ca_path`, on all nodes. Unset: no TLS between nodes.",
    )
    tls_key_path: OptionalPath = Field(None, description="PEM private key of `tls_cert_path`.")
    tls_ca_path: OptionalPath = Field(
        None, description="PEM certificates of the authorities that signed the certificates of all nodes."
    )
    lease_secs: Seconds = Field(
        2.5,
        description="How long a node may be silent before the others take its shards over. Where nodes differ, as while"
        " it is changed on one after the other, the longer one counts.",
    )
    standbys: Count = Field(
        0,
        ge=0,
        le=256,
        description="How many shards of other nodes this node keeps up to date in memory (warm standbys), to take them"
        " over without loading them. Each is a process. Shards divided by nodes is enough for one of each shard.",
    )
    standby_reads: bool = Field(
        False,
        description="Whether a node answers reads of a shard from its warm standby instead of relaying them to the"
        " owner. Before each answer the owner is asked what it has committed, so no read is older than one from the"
        " owner. The same on all nodes.",
    )
    require_standby: bool = Field(
        True,
        description="Refuse to start unless Postgres replicates synchronously to a connected standby. Turn it off only"
        " for a managed database that replicates below Postgres.",
    )

    @field_validator("secret")
    @classmethod
    def _check_secret(cls, value: str) -> str:
        if value and len(value) < SECRET_MIN_LENGTH:
            raise ValueError(f"shorter than {SECRET_MIN_LENGTH} characters")
        return value

    @model_validator(mode="after")
    def _all_tls_files_or_none(self) -> ClusterSettings:
        if len({path is None for path in (self.tls_cert_path, self.tls_key_path, self.tls_ca_path)}) > 1:
            raise ValueError("set all of tls_cert_path, tls_key_path and tls_ca_path, or none")
        return self
