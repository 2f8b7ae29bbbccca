"""Ask a node of a cluster for what its shards have in the object store and in their caches."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import msgspec

from headwater.http.paths import CLUSTER

ANSWER_S: Final = 7.0
"""A node itself waits up to 6 seconds for Postgres and the processes of the shards."""
CONNECT_S: Final = 1.0


class _Shard(msgspec.Struct):
    id: int
    figures: dict[str, int] | None = None


class _Cluster(msgspec.Struct):
    id: str
    shards: list[_Shard]


class _Answer(msgspec.Struct):
    cluster: _Cluster | None


_DECODER: Final = msgspec.json.Decoder(_Answer)


class ShardFigures(NamedTuple):
    by_shard: dict[int, dict[str, int]]
    """The figures of the shards whose processes answered."""
    problem: str | None
    """Why no node answered, or None."""


def figures_of(cluster_id: str, urls: Iterable[str], token: str, ca_file: Path | None) -> ShardFigures:
    """Ask these servers, one after the other, until a node of this cluster answers."""
    problem = "no node responds"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    tls = ssl.create_default_context(cafile=ca_file)
    with httpx.Client(headers=headers, verify=tls, timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S)) as client:
        for url in urls:
            try:
                response = client.get(f"{url.rstrip('/')}{CLUSTER}")
                if response.status_code != httpx.codes.OK:
                    problem = f"{url} answers with status {response.status_code}"
                    continue
                found = _DECODER.decode(response.content).cluster
            except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError) as error:
                problem = f"{url}: {str(error) or type(error).__name__}"
                continue
            if found is not None and found.id == cluster_id:
                return ShardFigures({each.id: each.figures for each in found.shards if each.figures}, None)
            problem = f"{url} is not a node of this cluster"
    return ShardFigures({}, problem)
