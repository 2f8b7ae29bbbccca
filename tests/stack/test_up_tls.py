"""`headwater up --tls`: browsers get HTTP/2 from Envoy, so that many event streams share one connection."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from playwright.sync_api import Playwright

from headwater.stack.certificates import LIFETIME, trial_certificate
from tests.browser import FLAGS, chromium
from tests.stack.stacks import Stack, stack

READERS = 20

FOLLOW = """
async ([url, token, readers]) => {
    const signal = AbortSignal.timeout(60_000)
    const first = async (number) => {
        const answer = await fetch(`${url}/v1/stream/tls/${number}?offset=-1&live=sse`,
                                   { headers: { authorization: `Bearer ${token}` }, signal })
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader()
        let text = ''
        while (!text.includes('hello')) {
            const { value, done } = await reader.read()
            if (done) throw new Error('the event stream ended')
            text += value
        }
        return reader
    }
    const open = await Promise.all([...Array(readers).keys()].map(first))
    await Promise.all(open.map((reader) => reader.cancel()))
    const [page] = performance.getEntriesByType('navigation')
    return { open: open.length, protocol: page.nextHopProtocol }
}
"""


def test_trial_certificate_is_kept_and_renewed_in_time(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    files = trial_certificate(tmp_path / "tls", now)
    first = files.certificate.read_bytes()
    assert files.key.stat().st_mode & 0o077 == 0, "only the owner can read the key"
    names = x509.load_pem_x509_certificate(first).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "localhost" in names.get_values_for_type(x509.DNSName)
    assert trial_certificate(tmp_path / "tls", now + timedelta(days=60)).certificate.read_bytes() == first
    assert trial_certificate(tmp_path / "tls", now + LIFETIME).certificate.read_bytes() != first
    files.certificate.write_text("damaged")
    assert trial_certificate(tmp_path / "tls", now).certificate.read_bytes().startswith(b"-----BEGIN")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("tls")) as made:
        made.up("--tls")
        yield made


def test_chromium_follows_twenty_streams_of_one_origin_at_once(running: Stack, playwright: Playwright) -> None:
    url = f"https://localhost:{running.ports['proxy']}"
    assert f"stream browser: {url}/ui/ " in running.said
    token = running.token()
    trusted = ssl.create_default_context(cafile=str(running.data / "tls" / "trial.crt"))
    with httpx.Client(base_url=url, verify=trusted, headers={"Authorization": f"Bearer {token}"}) as http:
        for number in range(READERS):
            http.put(f"/v1/stream/tls/{number}", headers={"Content-Type": "text/plain"}).raise_for_status()
            http.post(
                f"/v1/stream/tls/{number}", headers={"Content-Type": "text/plain"}, content="hello"
            ).raise_for_status()
        located = http.put("/v1/stream/tls/located", headers={"Content-Type": "text/plain"}).headers["location"]
        assert located == f"{url}/v1/stream/tls/located", "Envoy tells the server that the client uses https"
    browser = playwright.chromium.launch(executable_path=chromium(), headless=True, args=list(FLAGS))
    try:
        page = browser.new_context(ignore_https_errors=True).new_page()
        page.goto(f"{url}/ui/")
        found = page.evaluate(FOLLOW, [url, token, READERS])
    finally:
        browser.close()
    assert found["open"] == READERS, "over HTTP/1.1 a browser opens only six connections"
    assert found["protocol"] == "h2"
