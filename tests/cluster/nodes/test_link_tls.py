"""TLS between nodes: certificates of one authority are required on both sides, and nothing is sent in plain text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
import uvloop

from headwater.cluster.nodes import shard_links
from headwater.cluster.nodes.link_tls import LinkTls
from headwater.config import ClusterSettings
from headwater.storage.interface import StorageError
from tests.cluster.nodes.test_shard_links import Process, link, owners
from tests.http.certificates import Certificate, make_certificate
from tests.waiting import async_wait_until


class Authority:
    """An authority with certificates for nodes."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._certificate = make_certificate(directory, name=name)

    def node(self, number: int) -> LinkTls:
        made = make_certificate(self._directory, name=f"{self._name}-{number}", issuer=self._certificate)
        return files(made, self._certificate)


def files(node: Certificate, authority: Certificate) -> LinkTls:
    return LinkTls(node.cert_path, node.key_path, authority.cert_path)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@pytest.fixture(autouse=True)
def _refusals_are_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_links, "GREETING_S", 1.0)


class Forwarder:
    """Between two processes: forwards connections, and keeps what both sides send. With TLS, it ends the connections of
    both with its own certificate."""

    def __init__(self, target: Process, tls: LinkTls | None = None) -> None:
        self._host, _, self._port = target.address.rpartition(":")
        self._tls = tls
        self._tasks: list[asyncio.Task[None]] = []
        self.seen = bytearray()
        self.address = ""

    async def __aenter__(self) -> Forwarder:
        context = self._tls.context(accepts=True) if self._tls is not None else None
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0, ssl=context)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        context = self._tls.context(accepts=False) if self._tls is not None else None
        there, back = await asyncio.open_connection(self._host, int(self._port), ssl=context)
        self._tasks += [
            asyncio.create_task(self._pump(reader, back)),
            asyncio.create_task(self._pump(there, writer)),
        ]

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                self.seen += data
                writer.write(data)
        except OSError:
            pass
        finally:
            writer.close()


def run(scene: Callable[[], Coroutine[None, None, None]]) -> None:
    """With the event loop of a server: its TLS is not that of the standard library."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scene())


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_what_nodes_send_each_other_cannot_be_read_on_the_wire(authority: Authority, is_encrypted: bool) -> None:
    async def scene() -> None:
        tls = [authority.node(number) if is_encrypted else None for number in range(2)]
        low, high = Process(0, tls=tls[0]), Process(2, tls=tls[1])
        try:
            async with Forwarder(low) as wire:

                def is_linked() -> bool:
                    high.links.connect_to({0: (low.epoch, wire.address)})
                    return low.peers.get(2) is not None and high.peers.get(0) is not None

                await async_wait_until(is_linked, what="the link")
                large = "a message that can be read" * 20_000
                assert await low.peers.ask(2, "echo", large) == [0, large]
                assert await high.peers.ask(0, "echo", large) == [2, large]
                assert (b"a message that can be read" in wire.seen) is not is_encrypted
                assert (b"sender_epoch" in wire.seen) is not is_encrypted
        finally:
            low.close()
            high.close()

    run(scene)


def refused(
    low_tls: LinkTls | None, high_tls: LinkTls | None, *expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two processes with these files are not linked, and the log has the reasons."""

    async def scene() -> None:
        low, high = Process(0, tls=low_tls), Process(2, tls=high_tls)
        try:

            def is_explained() -> bool:
                high.links.connect_to(owners(low))
                return all(reason in caplog.text for reason in expected)

            await async_wait_until(is_explained, what=f"{expected} in the log")
            assert low.peers.get(2) is None
            assert high.peers.get(0) is None
        finally:
            low.close()
            high.close()

    run(scene)


def test_node_with_the_certificate_of_another_authority_is_refused(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = Authority(tmp_path, "stranger").node(1)
    reason = "its certificate was not signed by the authority of cluster.tls_ca_path"
    refused(authority.node(0), stranger, "shard 0 at 127.0.0.1", reason, caplog=caplog)


def test_node_that_trusts_the_others_but_is_not_trusted_is_refused(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the accepting side can see that the certificate is wrong."""
    trusted, stranger = authority.node(1), Authority(tmp_path, "stranger").node(1)
    half = LinkTls(stranger.cert_path, stranger.key_path, trusted.ca_path)
    reason = "a connection of another node was refused: its certificate was not signed by the authority"
    refused(authority.node(0), half, reason, caplog=caplog)


def test_node_without_tls_is_refused_by_one_that_uses_it(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    refused(authority.node(0), None, "it did not begin TLS", caplog=caplog)


def test_node_without_tls_is_not_used_by_one_that_uses_it(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    expected = ("it does not use TLS. Set cluster.tls_cert_path", "it uses TLS, and this node does not")
    refused(None, authority.node(1), *expected, caplog=caplog)


def test_certificate_does_not_replace_the_secret(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        low, stranger = (
            Process(0, tls=authority.node(0)),
            Process(2, "the secret of another one", tls=authority.node(1)),
        )
        try:
            stranger.links.connect_to(owners(low))
            await async_wait_until(
                lambda: "did not prove that it knows cluster.secret" in caplog.text, what="the refusal"
            )
            assert low.peers.get(2) is None
        finally:
            low.close()
            stranger.close()

    run(scene)


def test_holder_of_a_certificate_cannot_relay_the_greeting(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not know the secret, so it passes the proofs of the others on; they are about other certificates."""

    async def scene() -> None:
        low, high = Process(0, tls=authority.node(0)), Process(2, tls=authority.node(1))
        try:
            async with Forwarder(low, authority.node(2)) as relay:
                high.links.connect_to({0: (low.epoch, relay.address)})
                await async_wait_until(
                    lambda: "did not prove that it knows cluster.secret" in caplog.text, what="the refusal"
                )
                assert low.peers.get(2) is None
                assert high.peers.get(0) is None
        finally:
            low.close()
            high.close()

    run(scene)


def test_renewed_certificate_is_used_for_the_next_connection(authority: Authority) -> None:
    async def scene() -> None:
        low, high = Process(0, tls=authority.node(0)), Process(2, tls=authority.node(1))
        try:
            await link(low, high)
            before = authority.node(1).fingerprint()
            authority.node(1)  # Replaces its files.
            assert authority.node(1).fingerprint() != before
            broken = low.peers.get(2)
            assert broken is not None
            broken.close()
            await async_wait_until(lambda: high.peers.get(0) is None, what="the end of the link")
            await link(low, high)
            assert await low.peers.ask(2, "echo", 1) == [0, 1]
        finally:
            low.close()
            high.close()

    run(scene)


def test_files_that_do_not_belong_together_are_reported(authority: Authority, tmp_path: Path) -> None:
    one, other = authority.node(0), authority.node(1)
    one.check()
    for wrong in (
        LinkTls(one.cert_path, other.key_path, one.ca_path),
        LinkTls(one.cert_path, one.key_path, one.key_path),
        LinkTls(one.cert_path, one.key_path, tmp_path / "missing"),
    ):
        with pytest.raises(StorageError, match=re.escape("cluster.tls_cert_path, cluster.tls_key_path and")):
            wrong.check()


def test_settings_need_all_files_or_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set all of tls_cert_path, tls_key_path and tls_ca_path"):
        ClusterSettings.model_validate({"tls_cert_path": str(tmp_path)})
