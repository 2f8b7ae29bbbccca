"""Take the images of the documentation: the stream browser and the chat example, light and dark.

    python -m tests.docs.pictures docs/images        (`make screenshots`)

Invariant: this module takes all images in `docs/images`, of a real server in a real browser.
"""

from __future__ import annotations

import itertools
import random
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import httpx
import psycopg
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser import MISSING, find_chromium
from tests.docs.markdown import REPOSITORY
from tests.examples.running import running_example
from tests.pipeline.syncing import syncing
from tests.postgres.databases import database
from tests.serving import Server, server_environment
from tests.ui.pages import Pages, post, put
from tests.ui.shop import open_shop

Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
VIEWPORT = (1120, 700)
PHONE = (390, 720)
MOVING = (1120, 420)
MOVING_FRAMES = 3
MOVING_MS = 600
"""The animated image: its size, the number of its frames, and how long each is shown."""
LIVE_MS = 25_000
"""How long to wait before an image with the chart of a live stream, until the chart has something to show."""
PIPELINE_RUNS_S = 45.0
"""How long to wait before the image of the pipeline, until it has data to show."""
BYTES_MAX = 250_000
"""The largest size of an image in the repository."""
MOVING_BYTES_MAX = 400_000
"""The largest size of the animated image, which has several frames."""

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-lcd-text", "--hide-scrollbars", "--disable-dev-shm-usage")
ORDER = '{"order":207,"customer":"Ada","total":12.5,"items":[]}'


def stream(page: Page, server: Server) -> None:
    ui = Pages(page, server.url)
    ui.open_stream("orders/2026")
    expect(ui.stream("orders/2026")).to_contain_text("messages")
    ui.reader("live")
    ui.messages.nth(8).click()
    expect(page.locator("#detail")).to_be_visible()


def live(page: Page, server: Server) -> None:
    ui = Pages(page, server.url)
    ui.open_stream("ticks")
    ui.reader("live")
    expect(page.locator("#rates")).to_contain_text("delivery time")
    page.wait_for_timeout(LIVE_MS)
    expect(ui.stream("archive/2025")).to_be_visible()


def moving(page: Page, server: Server) -> None:
    page.set_viewport_size({"width": MOVING[0], "height": MOVING[1]})
    live(page, server)


def append(page: Page, server: Server) -> None:
    ui = Pages(page, server.url)
    ui.open_stream("orders/2026")
    ui.reader("live")
    page.keyboard.press("a")
    ui.append(ORDER, ("checkout-7", "0", "0"))
    expect(ui.append(ORDER, ("checkout-7", "0", "0"))).to_contain_text("Duplicate")
    page.locator("#append-answer").scroll_into_view_if_needed()


def view(place: str, sign: str) -> Callable[[Page, Server], None]:
    def open_view(page: Page, server: Server) -> None:
        ui = Pages(page, server.url)
        ui.open(place)
        expect(page.locator(sign).first).to_be_visible()
        expect(ui.stream("archive/2025")).to_contain_text("closed")

    return open_view


def phone(page: Page, server: Server) -> None:
    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    ui = Pages(page, server.url)
    ui.open_stream("session-events")
    ui.reader("live")


def chat(page: Page, _: Server) -> None:
    page.set_viewport_size({"width": 720, "height": 460})
    with tempfile.TemporaryDirectory() as data, running_example("chat", Path(data)) as run:
        page.goto(run.url)
        expect(page.locator("#status")).to_have_text("ready")
        page.locator("#question").fill("What is a durable stream?")
        page.keyboard.press("Enter")
        expect(page.locator("li.assistant")).to_contain_text("second tab")


def agents(page: Page, server: Server) -> None:
    page.set_viewport_size({"width": 720, "height": 560})
    with agents_script(server, f"chat/{time.monotonic_ns()}") as address:
        page.goto(address)
        expect(page.locator("#presence li")).to_have_count(4)
        page.locator("#question").fill("What is a durable stream?")
        page.keyboard.press("Enter")
        expect(page.locator("li[data-from=writer]")).to_contain_text("kill me")


def editor(page: Page, _: Server) -> None:
    page.set_viewport_size({"width": 720, "height": 460})
    with tempfile.TemporaryDirectory() as data, running_example("editor", Path(data)) as run:
        other = page.context.new_page()
        for opened, text in (
            (page, "Two people write this text.\n"),
            (other, "Each sees the other one's cursor,\nand what is typed offline is merged afterwards."),
        ):
            opened.goto(f"{run.url}/?doc=picture")
            expect(opened.locator("#status")).to_have_text("saved")
            opened.locator(".cm-content").focus()
            opened.keyboard.press("Control+End")
            opened.keyboard.type(text)
        expect(page.locator(".cm-content")).to_contain_text("merged afterwards")
        expect(page.locator("#people li")).to_have_count(2)
        expect(page.locator(".cm-ySelectionCaret")).to_have_count(1)


PICTURES: dict[str, Callable[[Page, Server], None]] = {
    "stream": stream,
    "live": live,
    "moving": moving,
    "append": append,
    "state": view("#/stream/session-events?tab=state", "#entities [data-index]"),
    "subscription": view("#/subscription/billing", "#cursors tr[data-stream]"),
    "pipeline": view("#/pipeline", "[data-query]"),
    "phone": phone,
    "chat": chat,
    "agents": agents,
    "editor": editor,
}


def names() -> list[str]:
    return [f"{name}-{scheme}.png" for name in PICTURES for scheme in SCHEMES]


def take_all(browser: Browser, directory: Path) -> None:
    """Take all images of one server."""
    directory.mkdir(parents=True, exist_ok=True)
    with (
        open_shop(with_pipeline=False) as server,
        ticking(server),
        piping(server) if "pipeline" in PICTURES else nullcontext(),
    ):
        for scheme in SCHEMES:
            for name, prepare in PICTURES.items():
                context = browser.new_context(
                    viewport={"width": VIEWPORT[0], "height": VIEWPORT[1]}, color_scheme=scheme, reduced_motion="reduce"
                )
                page = context.new_page()
                page.set_default_timeout(60_000)
                prepare(page, server)
                picture = smaller(page.screenshot(animations="disabled", caret="hide"))
                if name == "moving":
                    picture = animated(picture, list(later_frames(page)))
                (directory / f"{name}-{scheme}.png").write_bytes(picture)
                context.close()


@contextmanager
def ticking(server: Server) -> Iterator[None]:
    """Append to a stream continuously, so that there is live data."""
    stop = threading.Event()

    def write() -> None:
        chance = random.Random(2)
        with httpx.Client(base_url=server.url) as http:
            put(http, "ticks")
            while not stop.wait(0.05 + chance.random() * 0.1):
                now = time.time_ns() // 1_000_000
                post(http, "ticks", [{"symbol": "HWTR", "price": round(100 + chance.random(), 1), "ts": now}])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()


@contextmanager
def piping(server: Server) -> Iterator[None]:
    """Run `headwater sync` with Postgres, and write to both sides."""
    stop = threading.Event()

    def write(postgres: str) -> None:
        chance = random.Random(3)
        with httpx.Client(base_url=server.url) as http, psycopg.connect(postgres, autocommit=True) as sql:
            for number in itertools.count():
                if stop.wait(0.2 + chance.random() * 0.4):
                    return
                event = {"type": "message", "key": f"msg:{number}", "operation": "set", "value": {"text": "hello"}}
                post(http, "chat/support", [event] * chance.randint(1, 40))
                sql.execute("INSERT INTO items (title) SELECT 'thing ' || n FROM generate_series(1, 3) AS n")

    with tempfile.TemporaryDirectory(prefix="headwater-pictures-") as temporary, database() as postgres:
        config = Path(temporary, "pipeline.toml")
        config.write_text(
            "[[to_postgres]]\nname = 'chat-to-postgres'\nstreams = ['chat/support']\n"
            "[[from_postgres]]\nname = 'items-to-stream'\ncreate_items = true\n"
            "tables = [{ table = 'items', stream = 'pg-items' }]\n",
            encoding="utf-8",
        )
        with syncing(Path(temporary), server.url, postgres.url, "--config", str(config)) as sync:
            sync.wait_until_ready()
            writer = threading.Thread(target=write, args=[postgres.url])
            writer.start()
            try:
                time.sleep(PIPELINE_RUNS_S)
                yield
            finally:
                stop.set()
                writer.join()


@contextmanager
def agents_script(server: Server, name: str, pause_s: float = 0.02) -> Iterator[str]:
    """Run the agents of the example in one process; yields the address of its page. It is killed at the end."""
    command = [sys.executable, "examples/agents/agents.py", "--url", server.url, "--stream", name, "--port", "0"]
    process = subprocess.Popen(
        [*command, "--pause", str(pause_s)], cwd=REPOSITORY, env=server_environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[2]
    finally:
        process.kill()
        process.wait(timeout=60)
        if process.stdout is not None:
            process.stdout.close()


def later_frames(page: Page) -> Iterator[tuple[int, int, bytes]]:
    """Frames of the part of the page that changes: left, top, and the image."""
    box = page.locator("#main").bounding_box()
    assert box is not None
    left, top = round(box["x"]), round(box["y"])
    clip = {"x": left, "y": top, "width": MOVING[0] - left, "height": MOVING[1] - top}
    for _ in range(MOVING_FRAMES - 1):
        page.wait_for_timeout(MOVING_MS)
        yield left, top, smaller(page.screenshot(animations="disabled", caret="hide", clip=clip))  # type: ignore[arg-type]


def animated(first: bytes, later: list[tuple[int, int, bytes]]) -> bytes:
    """An animated PNG: the first image whole, then the parts that change. It repeats forever."""
    out = [first[:8], _chunk(b"IHDR", _content(first, b"IHDR")), _chunk(b"acTL", struct.pack(">II", len(later) + 1, 0))]
    sequence = 0
    for left, top, picture in [(0, 0, first), *later]:
        assert _content(picture, b"IHDR")[8:] == _content(first, b"IHDR")[8:], "all frames have the same kind of pixels"
        width, height = size_of(picture)
        place = struct.pack(">IIIIIHHBB", sequence, width, height, left, top, MOVING_MS, 1000, 0, 0)
        out.append(_chunk(b"fcTL", place))
        sequence += 1
        pixels = _content(picture, b"IDAT")
        if picture is first:
            out.append(_chunk(b"IDAT", pixels))
        else:
            out.append(_chunk(b"fdAT", struct.pack(">I", sequence) + pixels))
            sequence += 1
    return b"".join([*out, _chunk(b"IEND", b"")])


def _content(picture: bytes, wanted: bytes) -> bytes:
    """The content of the first chunk of a kind."""
    at = 8
    while True:
        (length,) = struct.unpack_from(">I", picture, at)
        if picture[at + 4 : at + 8] == wanted:
            return picture[at + 8 : at + 8 + length]
        at += 12 + length


def smaller(picture: bytes) -> bytes:
    """The same PNG with the best compression of zlib."""
    head, at, pixels, out = picture[:8], 8, b"", []
    while at < len(picture):
        (length,) = struct.unpack_from(">I", picture, at)
        kind, content = picture[at + 4 : at + 8], picture[at + 8 : at + 8 + length]
        at += 12 + length
        if kind == b"IDAT":
            pixels += content
        elif kind == b"IEND":
            out.append(_chunk(b"IDAT", zlib.compress(zlib.decompress(pixels), 9)))
            out.append(_chunk(kind, content))
        elif kind == b"IHDR":
            out.append(_chunk(kind, content))
    return head + b"".join(out)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def size_of(picture: bytes) -> tuple[int, int]:
    """Width and height, from its header."""
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack_from(">II", picture, 16)
    return width, height


def main() -> None:
    found = find_chromium()
    if found is None:
        raise SystemExit(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, headless=True, args=list(FLAGS))
        directory, *only = sys.argv[1:]
        for name in PICTURES.keys() - set(only or PICTURES):
            del PICTURES[name]
        take_all(browser, Path(directory))
        browser.close()


if __name__ == "__main__":
    main()
