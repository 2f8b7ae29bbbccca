"""The network of one node: its connections to the servers of Postgres and to the object store pass proxies."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from tests.client.proxies import CutAnswers, CutNetwork


class CutLink(CutAnswers, CutNetwork):
    """Can be cut for a while, or at a byte of an answer."""


class NodeNetwork:
    """The connections to other nodes do not pass it: a node publishes the addresses that it listens on."""

    def __init__(self, postgres_ports: Sequence[int], store_url: str) -> None:
        self.postgres = [CutLink(f"http://127.0.0.1:{port}") for port in postgres_ports]
        self.store = CutLink(store_url)
        self._ports = dict(zip(postgres_ports, (urlsplit(link.url).port for link in self.postgres), strict=True))

    @property
    def links(self) -> list[CutLink]:
        return [*self.postgres, self.store]

    def postgres_url(self, url: str) -> str:
        """The address of the servers as this node sees it."""
        for port, proxied in self._ports.items():
            url = url.replace(f"127.0.0.1:{port}", f"127.0.0.1:{proxied}")
        return url

    def close(self) -> None:
        for link in self.links:
            link.close()
