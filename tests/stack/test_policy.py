"""What a token allows: scopes, namespaces, reserved names and rate limits, with attempts to bypass each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.serving import Server, serve
from tests.stack.proxying import Answer, Proxied, proxied
from tests.ui.pages import Pages

# The services of this module are started once, in one test worker.
TEXT = "Content-Type: text/plain"
SECRET = b"a secret of tenant-b"
READ, WRITE, ADMIN = "streams:read", "streams:write", "streams:admin"


@pytest.fixture(scope="module")
def behind() -> Iterator[Server]:
    with serve(DS_REGISTRY__ENABLED="true", DS_SERVER__ROOTS="/v1/stream,/streams") as server:
        for path in ("/v1/stream/tenant-a/mine", "/v1/stream/tenant-b/theirs", "/v1/stream/tenant-a-b/near"):
            httpx.put(f"{server.url}{path}", content=SECRET, headers={"Content-Type": "text/plain"})
        for bucket in ("tenant-a", "tenant-b", "__private"):
            httpx.put(f"{server.url}/ds/{bucket}")
            httpx.put(f"{server.url}/ds/{bucket}/notes", content=SECRET, headers={"Content-Type": "text/plain"})
        yield server


@pytest.fixture(scope="module")
def proxy(behind: Server) -> Iterator[Proxied]:
    with proxied(behind.port, DS_SERVER__ROOTS="/v1/stream,/streams") as running:
        yield running


@pytest.fixture(scope="module")
def strict(behind: Server) -> Iterator[Proxied]:
    with proxied(behind.port, DS_AUTH__REQUIRE_SCOPES="true", DS_AUTH__REQUIRE_NAMESPACE="true") as running:
        yield running


# --- scopes


@pytest.mark.parametrize(
    ("scope", "may"),
    [
        ("", set()),
        ("openid profile", set()),
        ("streams:readx xstreams:write streams:", set()),
        (READ, {"GET", "HEAD"}),
        (WRITE, {"PUT", "POST", "HEAD", "DELETE"}),
        (f"openid {READ} {WRITE}", {"PUT", "POST", "GET", "HEAD", "DELETE"}),
        (ADMIN, {"PUT", "POST", "GET", "HEAD", "DELETE"}),
    ],
)
def test_scope_allows_its_methods(strict: Proxied, behind: Server, scope: str, may: set[str]) -> None:
    name = f"/v1/stream/tenant-a/scoped-{len(scope)}"
    httpx.put(f"{behind.url}{name}", headers={"Content-Type": "text/plain"})
    token = strict.token(scope=scope, ns="tenant-a")
    for method in ("PUT", "POST", "HEAD", "GET", "DELETE"):
        answer = strict.raw(method, name, TEXT, token=token, body=b"x" if method == "POST" else b"")
        assert (answer.status != 403) == (method in may), (method, answer)


@pytest.mark.parametrize("method", ["get", "PATCH", "PURGE", "TRACE", "X-GET"])
def test_other_methods_need_the_write_scope_and_are_rejected_by_the_server(strict: Proxied, method: str) -> None:
    reader = strict.token(scope=READ, ns="tenant-a")
    assert strict.raw(method, "/v1/stream/tenant-a/mine", token=reader).status in {400, 403, 405}


@pytest.mark.parametrize(
    "line", ["X-HTTP-Method-Override: DELETE", "X-Original-URL: /v1/stream/tenant-b/theirs", "X-Rewrite-URL: /metrics"]
)
def test_method_and_path_override_headers_are_ignored(strict: Proxied, behind: Server, line: str) -> None:
    answer = strict.raw("GET", "/v1/stream/tenant-a/mine", line, token=strict.token(scope=READ, ns="tenant-a"))
    assert answer.status == 200
    assert httpx.head(f"{behind.url}/v1/stream/tenant-a/mine").status_code == 200


def test_namespace_can_be_required(strict: Proxied) -> None:
    assert strict.raw("GET", "/v1/stream/tenant-a/mine", token=strict.token(scope=READ)).code == "no_namespace"
    assert strict.raw("GET", "/v1/stream/tenant-a/mine", token=strict.token(scope=ADMIN)).status == 200


# --- namespaces


def test_a_namespaced_token_works_in_its_namespace_on_both_surfaces(proxy: Proxied) -> None:
    token = proxy.token(ns="tenant-a")
    assert proxy.raw("GET", "/v1/stream/tenant-a/mine", token=token).status == 200
    assert proxy.raw("PUT", "/v1/stream/tenant-a/deep/er", TEXT, token=token).status == 201
    assert proxy.raw("GET", "/v1/stream/tenant%2Da/mine", token=token).status == 200
    assert proxy.raw("GET", "/v1/stream/tenant-a%2Fmine", token=token).status == 200
    assert proxy.raw("GET", "/ds/tenant-a/notes", token=token).status == 200
    assert proxy.raw("GET", "/ds/tenant-a/streams", token=token).status == 200
    assert proxy.raw("GET", "/ds/tenant-a", token=token).status == 200


@pytest.mark.parametrize(
    "target",
    [
        "/v1/stream/tenant-b/theirs",
        "/v1/stream/tenant-a-b/near",
        "/v1/stream/tenant-a",
        "/v1/stream/tenant-a/",
        "/v1/stream/other",
        "/v1/stream/TENANT-A/x",
        "/v1/stream/tenant-a/../tenant-b/theirs",
        "/v1/stream/tenant-a/%2e%2e/tenant-b/theirs",
        "/v1/stream/tenant-a/%2E./tenant-b/theirs",
        "/v1/stream/tenant-a/..%2ftenant-b/theirs",
        "/v1/stream/tenant-a/..%2Ftenant-b%2Ftheirs",
        "/v1/stream/tenant-b%2Ftheirs",
        "/v1/stream/tenant-a%2F..%2Ftenant-b%2Ftheirs",
        "/v1/stream/tenant-a%2F%2E%2E%2Ftenant-b%2Ftheirs",
        "/v1/stream/%2Ftenant-b/theirs",
        "/v1/stream/tenant-a%2F",
        "/v1/stream/__ds%2Fsubscriptions",
        "/v1/stream/__registry__%2F",
        "/v1/stream/tenant-a/..%5ctenant-b/theirs",
        "/v1/stream/tenant-a/..\\tenant-b\\theirs",
        "/v1/stream/tenant-a/%252e%252e/tenant-b/theirs",
        "/v1/stream//tenant-b/theirs",
        "/v1/stream/tenant-a//../../tenant-b/theirs",
        "/v1/stream/./tenant-b/theirs",
        "/v1/stream/tenant%2Db/theirs",
        "/v1/stream/%74enant-b/theirs",
        "/v1/stream/tenant-b/theirs?x=/v1/stream/tenant-a/",
        "/v1/stream/tenant-b/theirs;/v1/stream/tenant-a/x",
        "/v1/stream/tenant-b/theirs#/tenant-a/",
        "http://localhost/v1/stream/tenant-b/theirs",
        "/v1/stream/tenant-a/x/../../tenant-b/theirs",
        "/ds/tenant-b/notes",
        "/ds/tenant-b",
        "/ds/tenant-b/streams",
        "/ds/tenant-b/notes/snapshot",
        "/ds/tenant-b/notes/bootstrap",
        "/ds/tenant-a/../tenant-b/notes",
        "/ds/tenant-a/%2e%2e/tenant-b/notes",
        "/ds/tenant-a%2f..%2ftenant-b/notes",
        "/ds//tenant-b/notes",
        "/ds/tenant%2Db/notes",
        "/ds/tenant-a-b/notes",
        "/ds",
        "/ds/",
        "/v1/stream/__registry__",
        "/v1/stream/__ds/subscriptions",
        "/v1/stream/__ds/subscriptions/s1",
        "/v1/stream/tenant-a/../__ds/subscriptions",
        "/metrics",
        "/readyz",
    ],
)
@pytest.mark.parametrize("scope", ["", ADMIN])
def test_no_encoding_of_a_path_leaves_the_namespace(proxy: Proxied, target: str, scope: str) -> None:
    token = proxy.token(ns="tenant-a", scope=scope)
    # The same under another root, which is an alias of the first one.
    for spelling in dict.fromkeys((target, target.replace("/v1/stream/", "/streams/", 1))):
        for method in ("GET", "PUT", "POST", "DELETE"):
            answer = proxy.raw(method, spelling, TEXT, token=token, body=b"{}" if method == "POST" else b"")
            inside = "/tenant-a/%252e" in spelling
            # A doubly encoded dot is a different name, within the namespace.
            assert answer.status in ({201, 204, 404, 200, 400} if inside else {400, 403}), (method, spelling, answer)
            assert SECRET not in answer.body


def test_streams_of_the_other_tenant_are_unchanged(behind: Server) -> None:
    for path in ("/v1/stream/tenant-b/theirs", "/ds/tenant-b/notes"):
        assert httpx.get(f"{behind.url}{path}?offset=-1").content == SECRET


@pytest.mark.parametrize(
    "source",
    [
        "/v1/stream/tenant-b/theirs",
        "/v1/stream/tenant%2Db/theirs",
        "/v1/stream/tenant-a/../tenant-b/theirs",
        "/v1/stream/tenant-a/..%2ftenant-b/theirs",
        "/v1/stream/tenant-b%2Ftheirs",
        "/v1/stream/tenant-a%2F..%2Ftenant-b%2Ftheirs",
        "/streams/tenant-b/theirs",
        "/streams/tenant-b%2Ftheirs",
        "/ds/tenant-b/notes",
        "/ds/tenant%2Db/notes",
        "/v1/stream/__registry__",
        "/streams/__registry__",
        "/v1/stream/%5F%5Fregistry__",
        "/v1/stream/__ds/subscriptions",
        "tenant-b/theirs",
        "http://localhost/v1/stream/tenant-b/theirs",
    ],
)
def test_fork_cannot_read_outside_the_namespace(proxy: Proxied, source: str) -> None:
    token = proxy.token(ns="tenant-a")
    for lines in (
        (f"Stream-Forked-From: {source}",),
        (f"stream-forked-from: {source}", "Stream-Forked-From: /v1/stream/tenant-a/mine"),
        ("Stream-Forked-From: /v1/stream/tenant-a/mine", f"STREAM-FORKED-FROM: {source}"),
        (f"Stream-Forked-From: /v1/stream/tenant-a/mine,{source}",),
    ):
        answer = proxy.raw("PUT", "/v1/stream/tenant-a/stolen", TEXT, *lines, token=token)
        # A comma is part of a name: this is one stream in the namespace, which does not exist.
        assert answer.status in {400, 403} or (answer.status == 404 and "," in lines[0]), (lines, answer)
    assert proxy.raw("GET", "/v1/stream/tenant-a/stolen", token=token).status == 404


def test_fork_within_the_namespace_needs_the_read_scope(proxy: Proxied, strict: Proxied) -> None:
    line = "Stream-Forked-From: /v1/stream/tenant-a/mine"
    fork = proxy.raw("PUT", "/v1/stream/tenant-a/fork", TEXT, line, token=proxy.token(ns="tenant-a"))
    assert fork.status == 201
    writer = strict.token(ns="tenant-a", scope=WRITE)
    assert strict.raw("PUT", "/v1/stream/tenant-a/fork2", TEXT, line, token=writer).code == "missing_scope"


@pytest.mark.parametrize(
    "claim",
    ["", "/", "..", "a/../b", "a//b", "/tenant-b", "tenant-b/", False, True, None, 0, ["tenant-b"], {"ns": "tenant-b"}],
)
def test_invalid_namespace_claim_allows_nothing(proxy: Proxied, claim: object) -> None:
    token = proxy.signed(ns=claim)
    for target in ("/v1/stream/tenant-b/theirs", "/v1/stream/tenant-a/mine", "/ds/tenant-b/notes"):
        assert proxy.raw("GET", target, token=token).status == 403


@pytest.mark.parametrize("claim", [{"admin": ADMIN}, {"1": ADMIN}, [ADMIN, 7], [None, ADMIN], [[ADMIN]], True, 7])
def test_scope_of_another_type_is_rejected(proxy: Proxied, strict: Proxied, claim: object) -> None:
    for door in (proxy, strict):
        answer = door.raw("GET", "/v1/stream/__registry__", token=door.signed(scope=claim))
        assert (answer.status, answer.code) == (403, "bad_scope")


@pytest.mark.parametrize(
    ("claim", "status"), [(f"{READ} {ADMIN}", 200), ([READ, ADMIN], 200), ([f"{READ} {ADMIN}"], 403), (None, 403)]
)
def test_a_scope_is_a_string_or_a_list_of_strings(strict: Proxied, claim: object, status: int) -> None:
    assert strict.raw("GET", "/v1/stream/__registry__", token=strict.signed(scope=claim)).status == status


# --- many streams


def follow(proxy: Proxied, token: str, *lines: str, root: str = "/v1/stream", **body: object) -> Answer:
    given = json.dumps(body).encode()
    return proxy.raw("POST", f"{root}/__ds/follow", "Content-Type: application/json", *lines, token=token, body=given)


def test_a_namespaced_token_lists_and_follows_its_own_streams(proxy: Proxied, strict: Proxied) -> None:
    token = proxy.token(ns="tenant-a")
    listed = proxy.raw("GET", "/v1/stream/__ds/streams?prefix=tenant-a/mine", token=token)
    assert [each["name"] for each in json.loads(listed.body)["streams"]] == ["tenant-a/mine"]
    for root in ("/v1/stream", "/streams"):
        assert follow(proxy, token, root=root, prefix="tenant-a/").status == 201
        assert (
            follow(proxy, token, root=root, streams={"tenant-a/mine": "-1", "/ds/tenant-a/notes": "-1"}).status == 201
        )
    assert follow(strict, strict.token(scope=READ, ns="tenant-a"), prefix="tenant-a/").status == 201
    assert follow(strict, strict.token(scope=WRITE, ns="tenant-a"), prefix="tenant-a/").code == "missing_scope"


@pytest.mark.parametrize(
    "body",
    [
        {"prefix": ""},
        {"prefix": "tenant-"},
        {"prefix": "tenant-a"},
        {"prefix": "tenant-a-b/"},
        {"prefix": "tenant-b/"},
        {"prefix": "tenant-a/", "streams": {"tenant-b/theirs": "-1"}},
        {"streams": {"tenant-a/mine": "-1", "tenant-b/theirs": "-1"}},
        {"streams": {"tenant-a/../tenant-b/theirs": "-1"}},
        {"streams": {"/v1/stream/tenant-b/theirs": "-1"}},
        {"streams": {"/streams/tenant-b/theirs": "-1"}},
        {"streams": {"/v1/stream/tenant-a%2F..%2Ftenant-b/theirs": "-1"}},
        {"streams": {"/ds/tenant-b/notes": "-1"}},
        {"streams": {"__registry__": "-1"}},
    ],
)
def test_nothing_outside_the_namespace_is_followed(proxy: Proxied, body: dict[str, Any]) -> None:
    """Even if the client sends the headers that only the proxy may set."""
    for scope in ("", ADMIN):
        for lines in ((), ("x-headwater-namespace: tenant-b", "x-headwater-reserved: allow")):
            answer = follow(proxy, proxy.token(ns="tenant-a", scope=scope), *lines, **body)
            assert answer.status in {400, 403}, answer
            assert SECRET not in answer.body


@pytest.mark.parametrize("prefix", ["", "tenant-", "tenant-a", "tenant-b/", "tenant-a-b/", "__"])
def test_nothing_outside_the_namespace_is_listed(proxy: Proxied, prefix: str) -> None:
    for query in (f"prefix={prefix}", f"prefix={prefix}&live=long-poll"):
        for root in ("/v1/stream", "/streams"):
            answer = proxy.raw("GET", f"{root}/__ds/streams?{query}", token=proxy.token(ns="tenant-a"))
            assert (answer.status, answer.code) == (403, "outside_namespace")


def test_follow_id_belongs_to_its_token(proxy: Proxied) -> None:
    session = json.loads(follow(proxy, proxy.token(ns="tenant-b"), prefix="tenant-b/").body)["id"]
    for token in (proxy.token(ns="tenant-a"), proxy.token(), proxy.token(ns="tenant-b", sub="mallory")):
        assert proxy.raw("GET", f"/v1/stream/__ds/follow/{session}", token=token).status == 404
    assert proxy.raw("GET", f"/v1/stream/__ds/follow/{session}").status == 401


def test_without_namespaces_only_administrators_can_follow_a_prefix(proxy: Proxied) -> None:
    assert follow(proxy, proxy.token(), streams={"tenant-a/mine": "-1"}).status == 201
    assert follow(proxy, proxy.token(), streams={"__registry__": "-1"}).status == 403
    assert follow(proxy, proxy.token(), prefix="tenant-a/").status == 403
    assert proxy.raw("GET", "/v1/stream/__ds/streams", token=proxy.token()).status == 403
    assert follow(proxy, proxy.token(scope=ADMIN), prefix="", streams={"__registry__": "-1"}).status == 201
    assert proxy.raw("GET", "/v1/stream/__ds/streams", token=proxy.token(scope=ADMIN)).status == 200


# --- reserved names


@pytest.mark.parametrize(
    "target",
    [
        "/v1/stream/__registry__",
        "/v1/stream/%5f%5fregistry__",
        "/v1/stream/_%5Fregistry__",
        "/v1/stream/x/../__registry__",
        "/v1/stream//__registry__",
        "/v1/stream/__ds/subscriptions",
        "/v1/stream/%5F_ds/subscriptions",
        "/v1/stream/__ds/subscriptions/x/claim",
        "/v1/stream/__ds/../__registry__",
        "/v1/stream/__anything/below",
        "/ds/__private/notes",
        "/ds/__private",
        "/ds/%5f_private/notes",
        "/ds/tenant-a/__notes",
        "/ds/tenant-a/%5F%5fnotes",
        "/metrics",
        "/readyz",
    ],
)
def test_ordinary_tokens_cannot_access_reserved_names(proxy: Proxied, target: str) -> None:
    for method in ("GET", "PUT", "DELETE"):
        answer = proxy.raw(method, target, TEXT, token=proxy.token(scope=f"{READ} {WRITE}"))
        assert answer.status in {400, 403}, (method, answer)
        assert SECRET not in answer.body
    opened = proxy.raw("GET", target, token=proxy.token(scope=ADMIN))
    assert opened.status not in {401, 403}, opened


def test_reserved_names_can_be_opened(behind: Server) -> None:
    with proxied(behind.port, DS_AUTH__OPEN_RESERVED="true") as proxy:
        assert proxy.raw("GET", "/v1/stream/__registry__", token=proxy.token()).status == 200
        assert proxy.raw("GET", "/v1/stream/__registry__", token=proxy.token(ns="tenant-a")).status == 403
        assert proxy.raw("GET", "/metrics", token=proxy.token()).status == 403


def test_workers_use_the_token_of_their_wake(proxy: Proxied) -> None:
    """Ack, release and callback use a token that the server issued and checks; it rejects any other."""
    for action in ("ack", "release", "callback"):
        body = b'{"wake_id":"w","generation":1}'
        answer = proxy.raw(
            "POST", f"/v1/stream/__ds/subscriptions/none/{action}", "Content-Type: application/json",
            token="not-a-jwt", body=body,
        )  # fmt: skip
        assert answer.status in {401, 404}
        assert b'"error"' in answer.body, "the response is from the proxy, not from the server"
        assert proxy.raw("GET", f"/v1/stream/__ds/subscriptions/none/{action}").status == 401
    assert "keys" in json.loads(proxy.raw("GET", "/v1/stream/__ds/jwks.json").body)


# --- rates


def test_each_subject_has_its_own_rate(behind: Server) -> None:
    with proxied(behind.port, DS_AUTH__RATE_LIMIT_PER_SEC="1", DS_AUTH__RATE_LIMIT_BURST="6") as proxy:
        tokens = {sub: proxy.token(sub=sub) for sub in ("greedy", "modest")} | {"again": proxy.token(sub="greedy")}

        def ask(who: str, *lines: str, target: str = "/v1/stream/tenant-a/mine") -> Answer:
            return proxy.raw("HEAD", target, *lines, token=tokens[who])

        answers = [ask("greedy") for _ in range(12)]
        refused = [answer for answer in answers if answer.status == 429]
        assert [answer.status for answer in answers[:6]] == [200] * 6
        assert refused
        assert all(answer.headers["retry-after"] == "1" for answer in refused)
        # A forged header, another path or another token of the same subject does not change the subject: at most one of
        # many requests passes, because the bucket gets one token per second.
        attempts = [
            ask("greedy", "X-JWT-Sub: modest"),
            ask("greedy", target="/ds/tenant-a/notes"),
            ask("again"),
            ask("greedy", target="/v1/stream//tenant-a/mine"),
        ]
        assert sum(answer.status == 429 for answer in attempts) >= 3
        assert ask("modest").status == 200
        assert proxy.raw("GET", "/healthz").status == 200


# --- the script itself


def test_failing_policy_rejects_requests(behind: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from headwater.stack import envoy
    from headwater.stack.policy import policy_script

    def broken(*arguments: object, **options: object) -> str:
        script = policy_script(*arguments, **options)  # type: ignore[arg-type]
        return script.replace("local function judge(handle)", "local function judge(handle)\n  error('broken')")

    monkeypatch.setattr(envoy, "policy_script", broken)
    with proxied(behind.port) as proxy:
        answer = proxy.raw("GET", "/v1/stream/tenant-a/mine", token=proxy.token())
        assert (answer.status, answer.code) == (500, "policy_failed")


# --- the stream browser


def test_pipeline_page_says_which_token_it_needs(proxy: Proxied, behind: Server, browser: Browser) -> None:
    """401 without a token, 403 with one that may not read reserved names; then with the one that the page names."""
    name = "/v1/stream/__pipeline__"
    value = {"name": "orders", "status": "running"}
    event = {"type": "query", "key": "orders", "value": value, "headers": {"operation": "upsert"}}
    httpx.put(f"{behind.url}{name}", json=[event]).raise_for_status()
    context = browser.new_context()
    try:
        for token, status in ((None, 401), (proxy.token(), 403)):
            page = context.new_page()
            ui = Pages(page, proxy.url)
            ui.open("#/pipeline" if token is None else f"#/pipeline?token={token}")
            absent = page.locator("#pipeline-absent")
            expect(absent).to_contain_text(f"{status}")
            expect(absent).to_contain_text("headwater token --scope streams:admin")
            expect(page.locator("#pipeline-status")).to_have_text("token needed")
            absent.evaluate("element => { window.shown = element; }")
            for _ in range(2):
                with page.expect_response(lambda response: "__pipeline__" in response.url):
                    pass
            assert page.evaluate("window.shown.isConnected"), "it is drawn again, which can lose a click"
            page.locator("#pipeline-token").click()
            page.locator("#token").fill(proxy.token(scope=ADMIN))
            ui.press("connect")
            ui.open("#/pipeline")
            expect(page.locator("[data-query=orders]")).to_be_visible()
            page.close()
    finally:
        context.close()
        httpx.delete(f"{behind.url}{name}")
