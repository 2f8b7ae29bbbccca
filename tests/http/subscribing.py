"""Short helpers for the subscription API."""

from __future__ import annotations

from base64 import urlsafe_b64decode
from typing import Any
from urllib.parse import quote

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


def assert_error(response: httpx.Response, status: int, code: str, **members: object) -> None:
    """Check that the answer is an error of the subscription API."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error["code"] == code, error
    assert len(error["message"]) > 10
    assert {name: error[name] for name in members} == members


class Subscription:
    """One subscription on a server, by id."""

    def __init__(self, http: httpx.Client, id_: str) -> None:
        self.http = http
        self.id = id_
        self.path = f"/v1/stream/__ds/subscriptions/{quote(id_, safe='')}"

    def put(self, **body: object) -> httpx.Response:
        return self.http.put(self.path, json=body)

    def create(self, **body: object) -> Subscription:
        response = self.put(**body)
        assert response.status_code == 201, response.text
        return self

    def webhook(self, url: str, pattern: str, **body: object) -> Subscription:
        return self.create(**{"type": "webhook", "pattern": pattern, "webhook": {"url": url}, **body})

    def pull(self, wake_stream: str, pattern: str, **body: object) -> Subscription:
        return self.create(**{"type": "pull-wake", "pattern": pattern, "wake_stream": wake_stream, **body})

    def get(self) -> dict[str, Any]:
        response = self.http.get(self.path)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def links(self) -> dict[str, dict[str, Any]]:
        """All of its links, read page by page."""
        page = self.get()
        found = {link["path"]: link for link in page["streams"]}
        while page["has_more"]:
            page = self.http.get(self.path, params={"after": page["next_cursor"]}).json()
            found |= {link["path"]: link for link in page["streams"]}
        assert len(found) == page["stream_count"]
        return found

    def acked(self, path: str) -> str:
        acked: str = self.links()[path]["acked_offset"]
        return acked

    def delete(self) -> None:
        assert self.http.delete(self.path).status_code == 204

    def claim(self, worker: str = "worker-1") -> httpx.Response:
        return self.http.post(f"{self.path}/claim", json={"worker": worker})

    def claimed(self, worker: str = "worker-1") -> dict[str, Any]:
        response = self.claim(worker)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def act(self, action: str, wake: dict[str, Any], **body: object) -> httpx.Response:
        """ack, release or callback, as the worker that got `wake` (an answered claim, or a webhook's body)."""
        token = wake.get("token") or wake["callback_token"]
        return self.http.post(
            f"{self.path}/{action}",
            json={"wake_id": wake["wake_id"], "generation": wake["generation"], **body},
            headers={"Authorization": f"Bearer {token}"},
        )


def acks_of(wake: dict[str, Any]) -> list[dict[str, str]]:
    """Build acks for all pending streams of a wake."""
    return [{"stream": stream["path"], "offset": stream["tail_offset"]} for stream in wake["streams"]]


def wake_events(http: httpx.Client, name: str) -> list[dict[str, Any]]:
    response = http.get(f"/v1/stream/{name}")
    assert response.status_code == 200, response.text
    events: list[dict[str, Any]] = response.json()
    return events


def key_set(http: httpx.Client) -> dict[str, Ed25519PublicKey]:
    """The published keys, by id."""
    response = http.get("/v1/stream/__ds/jwks.json")
    assert response.status_code == 200
    return {key["kid"]: Ed25519PublicKey.from_public_bytes(_decoded(key["x"])) for key in response.json()["keys"]}


def verify(signature: str, raw: bytes, keys: dict[str, Ed25519PublicKey]) -> int:
    """Check a Webhook-Signature as a receiver does; return its time in seconds."""
    fields = dict(part.split("=", 1) for part in signature.split(","))
    assert list(fields) == ["t", "kid", "ed25519"]
    keys[fields["kid"]].verify(_decoded(fields["ed25519"]), fields["t"].encode() + b"." + raw)
    return int(fields["t"])


def _decoded(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))
