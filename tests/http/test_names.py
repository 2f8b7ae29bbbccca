"""Stream names: decoded once, one canonical form per stream; ambiguous names are refused."""

from __future__ import annotations

import httpx
import pytest

from tests.http.protocol import Stream
from tests.http.raw import RawResponse, connect
from tests.serving import Server

TEXT = {"Content-Type": "text/plain"}

AMBIGUOUS = [
    "",
    "..",
    ".",
    "a/..",
    "a/../b",
    "../a",
    "a/./b",
    "%2e%2e",
    "%2E%2E/a",
    "a/%2e%2e/b",
    ".%2e",
    "a/%2e",
    "a//b",
    "/a",
    "a/",
    "%2f",
    "a%2f",
    "%2Fa",
    "a%2f%2Fb",
    "a%2f..%2fb",
    "__ds%2Fsubscriptions",
    "a%5cb",
    "a%00b",
    "%00",
    "a%0ab",
    "a%0d%0aSet-Cookie:x",
    "a%7f",
    "a%1fb",
    "a%",
    "a%4",
    "a%zz",
    "%",
    "%u0041",
    "a%ff",
    "a%c3",
    "a%ed%a0%80",
    "a%c0%af",
    "a%c0%ae%c0%ae",
]


def send(server: Server, method: str, name: str, body: bytes = b"") -> RawResponse:
    """Send the name unchanged; a client library would normalize it."""
    with connect(server) as connection:
        headers = TEXT if body or method == "PUT" else {}
        return connection.request(method, f"/v1/stream/{name}", headers=headers, body=body)


@pytest.mark.parametrize("method", ["PUT", "GET", "POST", "HEAD", "DELETE"])
@pytest.mark.parametrize("name", AMBIGUOUS, ids=lambda name: name or "empty")
def test_t29_an_ambiguous_name_is_400_for_every_method(server: Server, name: str, method: str) -> None:
    answer = send(server, method, name, b"x" if method in ("PUT", "POST") else b"")
    assert answer.status == 400
    if method != "HEAD":
        assert b'"invalid_name"' in answer.body


def test_t29_two_spellings_of_a_name_are_one_stream(server: Server, stream: Stream) -> None:
    stream.create("data")
    spelled = "".join(f"%{ord(character):02x}" for character in stream.name)
    upper = spelled.upper()
    for name in (spelled, upper, f"%{ord(stream.name[0]):x}{stream.name[1:]}"):
        assert send(server, "GET", name).body == b"data"
    assert send(server, "PUT", spelled).status == 200


def test_t29_an_encoded_slash_is_a_slash(server: Server, stream: Stream) -> None:
    """TanStack's adapter encodes a name as one segment: `runs%2F{id}`."""
    assert send(server, "PUT", f"{stream.name}%2Fruns%2f7", b"data").status == 201
    for name in (f"{stream.name}/runs/7", f"{stream.name}%2fruns/7", f"{stream.name}/runs%2F7"):
        assert send(server, "GET", name).body == b"data"
        assert send(server, "PUT", name).status == 200
    assert send(server, "DELETE", f"{stream.name}/runs%2F7").status == 204
    assert send(server, "GET", f"{stream.name}/runs/7").status == 404


def test_t29_a_name_is_decoded_once(server: Server, stream: Stream) -> None:
    assert send(server, "PUT", f"{stream.name}-%2561").status == 201
    assert send(server, "GET", f"{stream.name}-a").status == 404
    assert send(server, "GET", f"{stream.name}-%61").status == 404
    assert send(server, "GET", f"{stream.name}-%25%36%31").status == 200


def test_t29_double_encoded_slash_or_dot_is_plain_text(server: Server, stream: Stream) -> None:
    for name in (f"{stream.name}-%252f", f"{stream.name}/%252e%252e"):
        assert send(server, "PUT", name).status == 201
        assert send(server, "GET", name).status == 200


@pytest.mark.parametrize(
    "suffix",
    [
        "/b/c/d/e",
        "-é",
        "-%C3%A9",
        "-🎈",
        "-a%20b",
        "-a+b",
        "-a;b=c,d",
        "-a:b@c",
        "-a'b(c)*!$&",
        "-~._",
        "-...",
        "/.hidden",
        "/a..b",
        "/__ds",
        "/__proto__",
        "/snapshot",
        "-%3Fnot-a-query%3Doffset",
        "-%23fragment",
        "-%25",
    ],
)
def test_any_unambiguous_name_is_accepted(client: httpx.Client, stream: Stream, suffix: str) -> None:
    path = f"{stream.path}{suffix}"
    created = client.put(path, content="data", headers=TEXT)
    assert created.status_code == 201
    assert client.get(path).content == b"data"
    # Location is a valid URL of the stream.
    assert client.get(created.headers["location"]).content == b"data"


def test_t29_a_plus_is_a_plus(client: httpx.Client, stream: Stream) -> None:
    client.put(f"{stream.path}+x", headers=TEXT)
    assert client.get(f"{stream.path}%2Bx").status_code == 200
    assert client.get(f"{stream.path}%20x").status_code == 404


def test_names_differ_by_case(client: httpx.Client, stream: Stream) -> None:
    client.put(f"{stream.path}/Name", content="upper", headers=TEXT)
    assert client.get(f"{stream.path}/name").status_code == 404


def test_segments_make_different_streams(client: httpx.Client, stream: Stream) -> None:
    for path in (stream.path, f"{stream.path}/a", f"{stream.path}/a/b"):
        assert client.put(path, content=path, headers=TEXT).status_code == 201
    client.delete(f"{stream.path}/a")
    assert client.get(stream.path).text == stream.path
    assert client.get(f"{stream.path}/a/b").text == f"{stream.path}/a/b"


def test_t29_a_name_of_1024_bytes_is_the_longest(server: Server, stream: Stream) -> None:
    fill = stream.name + "x" * (1024 - len(stream.name))
    assert send(server, "PUT", fill).status == 201
    assert send(server, "PUT", fill + "x").status == 400
    # The limit counts the UTF-8 bytes of the decoded name.
    wide = fill[:-2] + "%C3%A9"
    assert send(server, "PUT", wide).status == 201
    assert send(server, "PUT", fill[:-1] + "%C3%A9").status == 400


@pytest.mark.parametrize("name", ["__ds", "__ds/x", "__ds/streams/x", "%5f%5fds/x", "__d%73"])
def test_t29_the_reserved_name_is_never_a_stream(server: Server, name: str) -> None:
    assert send(server, "PUT", name, b"x").status in (400, 404, 405)
    assert send(server, "GET", name).status in (400, 404, 405)


@pytest.mark.parametrize("name", ["__dsx", "x__ds", "__DS", "__d"])
def test_names_similar_to_the_reserved_one_are_allowed(server: Server, name: str) -> None:
    assert send(server, "PUT", name, b"x").status == 201
    assert send(server, "DELETE", name).status == 204


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/stream", "/v1/streams/x", "/V1/stream/x", "/v2/stream/x"])
def test_other_paths_are_404(server: Server, path: str) -> None:
    with connect(server) as connection:
        answer = connection.request("GET", path)
    assert answer.status == 404
    assert answer.header("content-type") == "application/problem+json"


def test_an_absolute_request_target_names_the_same_stream(server: Server, stream: Stream) -> None:
    stream.create("data")
    with connect(server) as connection:
        read = connection.request("GET", f"http://localhost:{server.port}{stream.path}?offset=-1")
    assert (read.status, read.body) == (200, b"data")


def test_bytes_above_ascii_in_a_target_are_never_a_server_error(server: Server, stream: Stream) -> None:
    with connect(server) as connection:
        connection.send(f"PUT {stream.path}-é HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n\r\n".encode())
        answer = connection.response()
    assert answer.status in (201, 400)
    if answer.status == 201:
        assert send(server, "GET", f"{stream.name}-%C3%A9").status == 200
