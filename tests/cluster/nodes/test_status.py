"""`headwater cluster status`: what Postgres has, and what a node says about the object store and the caches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headwater.cli import command_line
from headwater.cluster.nodes.schema import connect, create_tables
from tests.http_handlers import HandlerServer, QuietHandler
from tests.ports import free_port
from tests.postgres.databases import database
from tests.ui.cluster_state import STATE

TOKEN = "of-these-tests-only"
STORED = ", object store 3 objects, 9500 bytes, waiting for it 0 bytes, cached 4000 bytes"


@contextmanager
def node(answer: dict[str, Any] | None) -> Iterator[int]:
    """The port of a server that answers as a node; one that has no answer is busy."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            is_known = self.headers["Authorization"] == f"Bearer {TOKEN}" and self.path == "/v1/stream/__ds/cluster"
            self.send_response(503 if answer is None else 200 if is_known else 401)
            self.end_headers()
            if is_known:
                self.wfile.write(json.dumps({"cluster": answer}).encode())

    with HandlerServer(Handler).running() as server:
        yield server.server_port


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    with database() as running:
        with connect(running.url, "test") as connection:
            create_tables(connection, "test", 2)
        yield running.url


@pytest.fixture
def answer(postgres_url: str) -> dict[str, Any]:
    """The answer of a node of this cluster."""
    with connect(postgres_url, "test") as connection:
        row: Any = connection.execute("SELECT id FROM headwater.cluster").fetchone()
    unanswered = {**STATE["shards"][1], "figures": None}
    return {**STATE, "id": row[0], "shards": [STATE["shards"][0], unanswered]}


def status(postgres_url: str, ports: list[int], *options: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that the command prints, with nodes at these ports."""
    with connect(postgres_url, "test") as connection:
        connection.execute("DELETE FROM headwater.node")
        for number, port in enumerate(ports):
            connection.execute(
                "INSERT INTO headwater.node (name, incarnation, address) VALUES (%s, %s, %s)",
                [f"node-{number}", f"node-{number}#1", f"127.0.0.1:{port}"],
            )
    monkeypatch.setenv("DS_CLUSTER__POSTGRES_URL", postgres_url)
    monkeypatch.setenv("DS_AUTH__TOKEN", TOKEN)
    return CliRunner().invoke(command_line(), ["cluster", "status", *options]).stdout.splitlines()


def test_first_node_that_answers_says_what_is_in_the_store_and_in_the_cache(
    postgres_url: str, answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with node(None) as busy, node({**answer, "id": "other"}) as other, node(answer) as good:
        ports = [free_port(), busy, other, good]
        lines = status(postgres_url, ports, monkeypatch=monkeypatch)
        printed = json.loads("\n".join(status(postgres_url, ports, "--json", monkeypatch=monkeypatch)))
    first, second = (line for line in lines if line.startswith("shard "))
    assert first.endswith(STORED)
    assert "object store" not in second, "its process did not answer"
    assert not any("unknown" in line for line in lines)
    assert [shard["figures"] for shard in printed["shards"]] == [STATE["shards"][0]["figures"], None]
    assert printed.keys() == STATE.keys()
    assert printed["shards"][0].keys() == STATE["shards"][0].keys()


@pytest.mark.parametrize(
    ("is_running", "reply", "reason"),
    [
        (False, None, "no node responds"),
        (True, None, "answers with status 503"),
        (True, {"id": "other", "shards": []}, "is not a node"),
    ],
)
def test_without_an_answer_of_a_node_the_rest_is_shown(
    *, is_running: bool, reply: Any, reason: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node(reply) as port:
        lines = status(postgres_url, [port] if is_running else [], monkeypatch=monkeypatch)
    assert sum(line.startswith("shard ") for line in lines) == 2
    assert lines[-1].startswith("object store and cache: unknown (")
    assert reason in lines[-1]


def test_node_that_is_named_gets_the_given_token(
    postgres_url: str, answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with node(answer) as port:
        url = f"http://127.0.0.1:{port}"
        lines = status(postgres_url, [], "--url", url, "--token", TOKEN, monkeypatch=monkeypatch)
        assert any(line.endswith(STORED) for line in lines)
        lines = status(postgres_url, [], "--url", url, "--token", "another", monkeypatch=monkeypatch)
        assert "status 401" in lines[-1], "auth.token is only for the nodes that Postgres has"
        for wrong in (["--ca-file", str(tmp_path / "none")], ["--url", "localhost:4437"]):
            refused = CliRunner().invoke(command_line(), ["cluster", "status", *wrong])
            assert wrong[0] in str(refused.exception)
