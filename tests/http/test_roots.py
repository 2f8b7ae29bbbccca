"""Several stream roots: aliases of one namespace, with the same rules for names."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.http.raw import RawResponse, connect
from tests.http.test_names import AMBIGUOUS
from tests.serving import Server, serve

JSON = {"Content-Type": "application/json"}
ROOTS = ("/v1/stream", "/streams", "/api/durable-streams")


@pytest.fixture(scope="module")
def rooted() -> Iterator[Server]:
    with serve(DS_SERVER__ROOTS=",".join(ROOTS)) as server:
        yield server


@pytest.fixture(scope="module")
def http(rooted: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=rooted.url) as client:
        yield client


def send(server: Server, method: str, target: str, body: bytes = b"") -> RawResponse:
    with connect(server) as connection:
        return connection.request(method, target, headers=JSON if body or method == "PUT" else {}, body=body)


@pytest.mark.parametrize("root", ROOTS)
def test_a_stream_has_one_name_below_every_root(rooted: Server, http: httpx.Client, root: str) -> None:
    """Also with an encoded slash, as TanStack AI sends it: `{root}/runs%2F{id}`."""
    name = f"runs/{len(root)}"
    created = send(rooted, "PUT", f"{root}/runs%2F{len(root)}", b"[1]")
    assert created.status == 201
    assert f"{root}/runs%2F{len(root)}" in (created.header("location") or "")
    for other in ROOTS:
        assert http.get(f"{other}/{name}", params={"offset": "-1"}).json() == [1]
    listed = http.get(f"{root}/__ds/streams", params={"prefix": name}).json()
    assert [each["name"] for each in listed["streams"]] == [name]


def test_a_fork_names_its_source_below_any_root(http: httpx.Client) -> None:
    http.put("/streams/source", content="[1]", headers=JSON)
    forked = http.put("/v1/stream/fork", headers={"Stream-Forked-From": "/api/durable-streams/source"})
    assert forked.status_code == 201
    assert http.get("/streams/fork", params={"offset": "-1"}).json() == [1]


@pytest.mark.parametrize("name", [*AMBIGUOUS, "__ds", "__ds/none", "../v1/stream/a"], ids=lambda name: name or "empty")
def test_name_rules_are_the_same_below_every_root(rooted: Server, name: str) -> None:
    first, *others = (send(rooted, "PUT", f"{root}/{name}", b"[1]") for root in ROOTS)
    for other in others:
        assert (other.status, json.loads(other.body)) == (first.status, json.loads(first.body))


@pytest.mark.parametrize("path", ["/streams", "/streamsx/a", "/Streams/a", "/streams%2Fa", "/%73treams/a", "/api/a"])
def test_paths_similar_to_a_root_are_404(rooted: Server, path: str) -> None:
    assert send(rooted, "PUT", path, b"[1]").status == 404


def test_without_the_setting_there_is_one_root(client: httpx.Client) -> None:
    assert client.put("/streams/a", headers=JSON).status_code == 404
