"""Shapes behind Envoy: the same tokens and scopes as streams, and unbuffered live reads."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.shapes.conftest import TABLES
from tests.shapes.npm_readers import npm_readers
from tests.shapes.serving import Shapes
from tests.stack.proxying import Proxied, proxied

NAME = TABLES[-2]


@pytest.fixture(scope="module")
def proxy(running: Shapes) -> Iterator[Proxied]:
    running.sql(f"CREATE TABLE {NAME} (id int PRIMARY KEY, title text, n int)")
    running.sql(f"INSERT INTO {NAME} SELECT i, 't' || i, i FROM generate_series(1, 50) i")
    with proxied(running.streams.port, shapes=running.port, DS_AUTH__REQUIRE_SCOPES="true") as started:
        yield started


def ask(proxy: Proxied, method: str, token: str | None, **query: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    content = b"{}" if method == "POST" else None
    params = {"table": NAME, "offset": "-1", **query}
    return httpx.request(method, f"{proxy.url}/v1/shape", params=params, headers=headers, content=content, timeout=60)


def test_a_token_with_the_scope_to_read_gets_shapes_and_subsets(proxy: Proxied) -> None:
    reads = proxy.token(scope="streams:read")
    assert ask(proxy, "GET", reads).status_code == 200
    assert ask(proxy, "POST", reads).status_code == 200


def test_tokens_without_the_read_scope_are_rejected(proxy: Proxied) -> None:
    assert ask(proxy, "GET", None).status_code == 401
    assert ask(proxy, "POST", None).status_code == 401
    for token in (
        proxy.token(),
        proxy.token(scope="streams:write"),
        proxy.token(scope="streams:read", ns="tenant-a"),
    ):
        assert ask(proxy, "GET", token).status_code == 403
        assert ask(proxy, "POST", token).status_code == 403
    assert ask(proxy, "DELETE", proxy.token(scope="streams:read streams:write")).status_code == 403
    # The streams of the logs have reserved names.
    handle = ask(proxy, "GET", proxy.token(scope="streams:read")).headers["electric-handle"]
    log = f"{proxy.url}/v1/stream/__shapes__/{handle}/snapshot"
    for scope, status in (("streams:read", 403), ("streams:admin", 200)):
        headers = {"Authorization": f"Bearer {proxy.token(scope=scope)}"}
        assert httpx.get(log, headers=headers).status_code == status


def test_the_client_follows_live_changes_through_envoy(running: Shapes, proxy: Proxied) -> None:
    token = proxy.token(scope="streams:read")
    with npm_readers() as readers:
        for mode in ("poll", "sse"):
            options = {"headers": {"Authorization": f"Bearer {token}"}}
            readers.open(mode, f"{proxy.url}/v1/shape", {"table": NAME}, sse=mode == "sse", options=options)
            readers.wait_for_sql(running, mode, f"SELECT id, title, n FROM {NAME}")
        running.sql(f"UPDATE {NAME} SET n = n + 1")
        for mode in ("poll", "sse"):
            readers.wait_for_sql(running, mode, f"SELECT id, title, n FROM {NAME}")
