"""Subscriptions as a resource: creation, refusals, and which streams are linked at which offset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.http.protocol import ZERO, Stream, assert_problem, offset
from tests.http.raw import connect
from tests.http.subscribing import Subscription, assert_error
from tests.serving import Server, serve

HOOK = {"type": "webhook", "pattern": "none/*", "webhook": {"url": "http://127.0.0.1:9/hook"}}
PULL = {"type": "pull-wake", "pattern": "none/*", "wake_stream": "none-wake"}


@pytest.fixture
def subscription(client: httpx.Client, stream_name: Callable[[], str]) -> Subscription:
    return Subscription(client, stream_name())


# -- create, confirm, read, delete


def test_put_creates_and_describes_the_subscription(subscription: Subscription, server: Server) -> None:
    response = subscription.put(**HOOK, streams=["a/b"], lease_ttl_ms=1234, description="what it is for")
    assert response.status_code == 201
    assert response.headers["location"] == f"{server.url}{subscription.path}"
    assert response.headers["cache-control"] == "no-store"
    body = response.json()
    signing = body["webhook"].pop("signing")
    assert body.pop("created_at").endswith("Z")
    assert body == {
        "id": subscription.id,
        "subscription_id": subscription.id,
        "type": "webhook",
        "pattern": "none/*",
        "streams": [{"path": "a/b", "link_type": "explicit", "acked_offset": ZERO}],
        "stream_count": 1,
        "has_more": False,
        "next_cursor": None,
        "webhook": {"url": "http://127.0.0.1:9/hook"},
        "lease_ttl_ms": 1234,
        "status": "active",
        "description": "what it is for",
    }
    assert signing == {
        "alg": "ed25519",
        "kid": signing["kid"],
        "jwks_url": f"{server.url}/v1/stream/__ds/jwks.json",
    }
    assert signing["kid"].startswith("ds_")
    assert subscription.get()["description"] == "what it is for"


def test_repeated_put_is_200_and_another_configuration_is_409(subscription: Subscription) -> None:
    assert subscription.put(**PULL).status_code == 201
    assert subscription.put(**PULL).status_code == 200
    assert subscription.put(**PULL, lease_ttl_ms=30_000, streams=[]).status_code == 200, (
        "omitted and default values are equal"
    )
    for change in ({"lease_ttl_ms": 5000}, {"pattern": "none/**"}, {"description": "x"}, {"streams": ["x"]}, HOOK):
        assert_error(subscription.put(**PULL | change), 409, "SUBSCRIPTION_ALREADY_EXISTS")
    assert subscription.get()["lease_ttl_ms"] == 30_000


def test_delete_is_idempotent_and_final(subscription: Subscription) -> None:
    subscription.create(**PULL)
    subscription.delete()
    assert_error(subscription.http.get(subscription.path), 404, "SUBSCRIPTION_NOT_FOUND")
    subscription.delete()
    assert subscription.put(**HOOK).status_code == 201, "the id is free again"


@pytest.mark.parametrize("id_", ["with space", "a/b", "ünï-✓", "50%", "q?#", "x" * 256])
def test_any_percent_encoded_id_is_accepted(client: httpx.Client, id_: str) -> None:
    subscription = Subscription(client, id_).create(**PULL)
    assert subscription.get()["id"] == id_
    subscription.delete()


@pytest.mark.parametrize("encoded", ["%00", "a%0Ab", "%FF", ".", "..", "%2e%2E", "x" * 257])
def test_ids_that_are_refused(server: Server, encoded: str) -> None:
    with connect(server) as connection:
        answer = connection.request("GET", f"/v1/stream/__ds/subscriptions/{encoded}")
    assert answer.status == 400
    assert b'"INVALID_REQUEST"' in answer.body


BAD_BODIES: list[tuple[str, bytes | dict[str, Any]]] = [
    ("no JSON", b"{"),
    ("no object", b"[]"),
    ("not UTF-8", b'{"type": "\xff"}'),
    ("nested too deeply", b"[" * 100_000),
    ("empty", b""),
    ("no type", {"pattern": "a"}),
    ("other type", PULL | {"type": "email"}),
    ("neither pattern nor streams", {"type": "pull-wake", "wake_stream": "w"}),
    ("empty pattern", PULL | {"pattern": ""}),
    ("half a wildcard", PULL | {"pattern": "events-*"}),
    ("reserved pattern", PULL | {"pattern": "__ds/*"}),
    ("pattern that is not text", PULL | {"pattern": 7}),
    ("streams that is not a list", PULL | {"streams": "a"}),
    ("streams with a number", PULL | {"streams": ["a", 1]}),
    ("streams with an empty name", PULL | {"streams": [""]}),
    ("streams with dots", PULL | {"streams": ["a/../b"]}),
    ("a bucket without a stream", PULL | {"streams": ["/ds/agents"]}),
    ("an invalid bucket id", PULL | {"streams": ["/ds/A!/x"]}),
    ("a pattern that no bucket stream matches", PULL | {"pattern": "/ds/agents/a/b"}),
    ("a wake stream in a bucket", PULL | {"wake_stream": "/ds/agents/wake"}),
    ("its own wake stream", PULL | {"streams": ["none-wake"]}),
    ("pull without wake_stream", {"type": "pull-wake", "pattern": "a"}),
    ("webhook without url", {"type": "webhook", "pattern": "a"}),
    ("webhook without a url", {"type": "webhook", "pattern": "a", "webhook": {}}),
    ("lease too short", PULL | {"lease_ttl_ms": 999}),
    ("lease too long", PULL | {"lease_ttl_ms": 600_001}),
    ("lease in words", PULL | {"lease_ttl_ms": "1000"}),
    ("lease in halves", PULL | {"lease_ttl_ms": 1000.5}),
    ("description in numbers", PULL | {"description": 5}),
]


@pytest.mark.parametrize("body", [body for _, body in BAD_BODIES], ids=[name for name, _ in BAD_BODIES])
def test_invalid_subscription_bodies_are_400(subscription: Subscription, body: bytes | dict[str, Any]) -> None:
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    response = subscription.http.put(subscription.path, **sent)
    assert_error(response, 400, "INVALID_REQUEST")
    assert_error(subscription.http.get(subscription.path), 404, "SUBSCRIPTION_NOT_FOUND")


def test_a_body_larger_than_any_subscription_is_413(subscription: Subscription) -> None:
    response = subscription.http.put(subscription.path, content=b" " * (1024 * 1024 + 1))
    assert_problem(response, 413, "payload_too_large")


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1/hook",
        "https://10.0.0.1/hook",
        "http://example.com/",
        "https://localhost/",
        "https://127.0.0.1/",
        "http://[::1]/",
        "http://0.0.0.0/",
        "https://169.254.169.254/latest/meta-data/",
        "https://[::ffff:169.254.169.254]/",
        "https://2130706433/",
        "https://0x7f.1/",
        "https://[64:ff9b::7f00:1]/",
        "https://user:secret@example.com/",
        "ftp://example.com/",
        "not a url",
        f"https://{'a' * 64}.example/",
    ],
)
def test_t35_unsafe_webhook_urls_are_400(subscription: Subscription, url: str) -> None:
    response = subscription.put(**HOOK | {"webhook": {"url": url}})
    assert_error(response, 400, "WEBHOOK_URL_REJECTED")
    assert_error(subscription.http.get(subscription.path), 404, "SUBSCRIPTION_NOT_FOUND")


@pytest.mark.parametrize("setting", [None, "", "false"])
def test_local_webhooks_are_refused_unless_the_setting_allows_them(setting: str | None) -> None:
    """This includes a server on loopback: through a proxy on this machine, anyone can reach it."""
    settings: Any = {} if setting is None else {"DS_SUBSCRIPTIONS__ALLOW_LOCAL_WEBHOOKS": setting}
    with serve(**settings) as server, httpx.Client(base_url=server.url) as http:
        assert_error(Subscription(http, "s").put(**HOOK), 400, "WEBHOOK_URL_REJECTED")


# -- addresses


@pytest.mark.parametrize(
    "path", ["__ds", "__ds/", "__ds/x", "__ds/subscriptions/", "__ds/subscriptions/s/x", "__ds/subscriptions/s/ack/x"]
)
def test_other_addresses_below_the_reserved_name_are_404(client: httpx.Client, path: str) -> None:
    for method in ("GET", "PUT", "POST"):
        response = client.request(method, f"/v1/stream/{path}", content=b"{}")
        assert response.status_code in (400, 404)
        assert set(response.json()) == {"error"}


@pytest.mark.parametrize(
    ("path", "method", "allow"),
    [
        ("s", "POST", "DELETE, GET, HEAD, OPTIONS, PUT"),
        ("s/claim", "GET", "OPTIONS, POST"),
        ("s/ack", "PUT", "OPTIONS, POST"),
        ("s/streams", "DELETE", "OPTIONS, POST"),
        ("s/streams/a", "POST", "DELETE, OPTIONS"),
    ],
)
def test_other_methods_are_405(client: httpx.Client, path: str, method: str, allow: str) -> None:
    response = client.request(method, f"/v1/stream/__ds/subscriptions/{path}")
    assert_problem(response, 405, "method_not_allowed")
    assert response.headers["allow"] == allow


@pytest.mark.parametrize("action", ["claim", "ack", "release", "callback", "streams"])
def test_requests_for_a_missing_subscription_are_404(subscription: Subscription, action: str) -> None:
    body = {"worker": "w", "wake_id": "w", "generation": 1, "streams": ["a"]}
    response = subscription.http.post(
        f"{subscription.path}/{action}", json=body, headers={"Authorization": "Bearer 1.w.x"}
    )
    assert_error(response, 404, "SUBSCRIPTION_NOT_FOUND")


def test_without_the_setting_there_are_no_subscriptions() -> None:
    with serve(DS_SUBSCRIPTIONS__ENABLED="false") as server, httpx.Client(base_url=server.url) as http:
        assert Subscription(http, "s").put(**PULL).status_code == 404
        assert http.get("/v1/stream/__ds/jwks.json").status_code == 404
        assert http.put("/v1/stream/__ds/x").status_code in (400, 404), "the name stays reserved"


def test_browsers_may_use_the_subscription_api(client: httpx.Client) -> None:
    response = client.options(
        "/v1/stream/__ds/subscriptions/s/claim",
        headers={"Origin": "https://app.example", "Access-Control-Request-Headers": "authorization, content-type"},
    )
    assert response.status_code == 204
    allowed = response.headers["access-control-allow-headers"].lower()
    assert "authorization" in allowed
    assert "content-type" in allowed


# -- links


def test_existing_streams_are_linked_at_their_tail_and_new_ones_at_their_beginning(
    subscription: Subscription, stream: Stream
) -> None:
    Stream(stream.http, f"{stream.name}/old").create("12345")
    Stream(stream.http, f"{stream.name}/empty").create()
    subscription.create(**PULL | {"pattern": f"{stream.name}/*"})
    Stream(stream.http, f"{stream.name}/new").create("abc")
    Stream(stream.http, f"{stream.name}/other/deep").create("abc")
    assert {name: link["acked_offset"] for name, link in subscription.links().items()} == {
        f"{stream.name}/old": offset(1, 5),
        f"{stream.name}/empty": ZERO,
        f"{stream.name}/new": ZERO,
    }


def test_fork_is_linked_at_its_fork_point(subscription: Subscription, stream: Stream) -> None:
    stream.create("12345")
    subscription.create(**PULL | {"pattern": f"{stream.name}/*"})
    fork = Stream(stream.http, f"{stream.name}/fork")
    fork.create(headers={"Stream-Forked-From": stream.path})
    assert subscription.acked(fork.name) == offset(1, 5)


def test_explicit_links_are_added_at_the_tail_and_removed(subscription: Subscription, stream: Stream) -> None:
    stream.create("12345")
    later = f"{stream.name}/later"
    subscription.create(**PULL)
    links = f"{subscription.path}/streams"
    assert subscription.http.post(links, json={"streams": [stream.name, f"/{later}/"]}).status_code == 204
    assert subscription.links() == {
        stream.name: {"path": stream.name, "link_type": "explicit", "acked_offset": offset(1, 5)},
        later: {"path": later, "link_type": "explicit", "acked_offset": ZERO},
    }
    stream.append("more")
    assert subscription.http.post(links, json={"streams": [stream.name]}).status_code == 204
    assert subscription.acked(stream.name) == offset(1, 5), "adding again changes nothing"
    assert subscription.http.delete(f"{links}/{stream.name}%2Flater").status_code == 204
    assert set(subscription.links()) == {stream.name}
    assert subscription.http.delete(f"{links}/{stream.name}").status_code == 204
    assert subscription.http.delete(f"{links}/{stream.name}").status_code == 204
    assert subscription.links() == {}


def test_a_link_may_be_named_by_several_segments_too(subscription: Subscription) -> None:
    subscription.create(**PULL, streams=["a/b/c"])
    assert subscription.http.delete(f"{subscription.path}/streams/a/b/c").status_code == 204
    assert subscription.links() == {}


def test_removing_an_explicit_link_leaves_the_pattern(subscription: Subscription, stream: Stream) -> None:
    one = Stream(stream.http, f"{stream.name}/one").create("12345")
    subscription.create(**PULL | {"pattern": f"{stream.name}/*"}, streams=[one.name])
    assert subscription.links()[one.name]["link_type"] == "explicit"
    subscription.http.delete(f"{subscription.path}/streams/{one.name.replace('/', '%2F')}")
    assert subscription.links()[one.name] == {"path": one.name, "link_type": "glob", "acked_offset": offset(1, 5)}


@pytest.mark.parametrize("body", [{}, {"streams": []}, {"streams": [""]}, {"streams": ["__ds/x"]}, {"streams": "a"}])
def test_invalid_links_are_400(subscription: Subscription, body: dict[str, Any]) -> None:
    subscription.create(**PULL)
    assert_error(subscription.http.post(f"{subscription.path}/streams", json=body), 400, "INVALID_REQUEST")
    assert_error(
        subscription.http.post(f"{subscription.path}/streams", json={"streams": ["ok", "none-wake"]}),
        400,
        "INVALID_REQUEST",
    )
    assert subscription.links() == {}


def test_deleting_a_stream_removes_its_pattern_link_and_keeps_an_explicit_one(
    subscription: Subscription, stream: Stream
) -> None:
    one = Stream(stream.http, f"{stream.name}/one").create("12345")
    two = Stream(stream.http, f"{stream.name}/two").create("12345")
    subscription.create(**PULL | {"pattern": f"{stream.name}/*"}, streams=[two.name])
    assert one.http.delete(one.path).status_code == 204
    assert two.http.delete(two.path).status_code == 204
    assert subscription.links() == {
        two.name: {"path": two.name, "link_type": "explicit", "acked_offset": ZERO},
    }
    two.create("x")
    claimed = subscription.claimed()
    assert [link["path"] for link in claimed["streams"] if link["has_pending"]] == [two.name]


def test_names_that_are_not_client_streams_are_never_linked(subscription: Subscription, client: httpx.Client) -> None:
    """A pattern for everything matches everything below /v1/stream/, but no streams of buckets."""
    bucket = f"bucket-{abs(hash(subscription.id)) % 10**8}"
    subscription.create(**PULL | {"pattern": "**"})
    if client.put(f"/ds/{bucket}").status_code in (200, 201):
        client.put(f"/ds/{bucket}/one", headers={"Content-Type": "text/plain"}, content="x")
    assert not [name for name in subscription.links() if name.startswith("/") or bucket in name]


def test_the_streams_of_a_subscription_are_read_page_by_page(subscription: Subscription) -> None:
    names = [f"{subscription.id}/{number}" for number in range(5)]
    created = subscription.put(**PULL, streams=names).json()
    assert (created["stream_count"], created["has_more"], created["next_cursor"]) == (5, False, None)
    found: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = subscription.http.get(subscription.path, params={"limit": "2", **after}).json()
        assert page["stream_count"] == 5
        found += [stream["path"] for stream in page["streams"]]
        if not page["has_more"]:
            break
        assert page["next_cursor"] == found[-1]
        after = {"after": page["next_cursor"]}
    assert found == names
    assert page["next_cursor"] is None
    refused = subscription.http.get(subscription.path, params={"limit": "0"})
    assert refused.status_code == 400
