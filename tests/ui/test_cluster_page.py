"""The page about the cluster. tests/cluster/nodes/test_copying.py checks that a node answers as `STATE` does."""

from __future__ import annotations

import copy
import json

import pytest
from playwright.sync_api import Route, expect

from tests.ui.cluster_state import STATE
from tests.ui.conftest import Watched
from tests.ui.pages import Pages


@pytest.mark.one_process
def test_server_that_is_not_a_node_has_no_link_to_a_cluster(ui: Pages) -> None:
    ui.open("#/cluster")
    expect(ui.page.locator("#no-cluster")).to_contain_text("not a node of a cluster")
    expect(ui.page.locator("nav a[href='#/cluster']")).to_be_hidden()


def test_page_shows_nodes_shards_and_what_is_wrong(ui: Pages, watched: Watched) -> None:
    state = copy.deepcopy(STATE)

    def answer(route: Route) -> None:
        route.fulfill(status=200, content_type="application/json", body=json.dumps({"cluster": state}))

    ui.page.route("**/__ds/cluster", answer)
    ui.open()
    ui.page.locator("nav a[href='#/cluster']").click()
    status = ui.page.locator("#cluster-status")
    for text in ("2 nodes", "2 shards served", "Postgres replicates"):
        expect(status).to_contain_text(text)
    for text in ("drains", "-3.5 s"):
        expect(ui.page.locator("[data-node='node-1']")).to_contain_text(text)
    shard = ui.page.locator("[data-shard='1']")
    for text in ("node-0", "served", "1,234", "2.5 KB in 2 batches", "9.5 KB in 3 objects", "4.0 KB"):
        expect(shard).to_contain_text(text)
    state["shards"][1] |= {"owner": None, "is_serving": False, "figures": None}
    state["nodes"][0] |= {"silent_s": 1_234.4, "responds": False}
    state["problem"] = "no synchronous standby is connected."
    expect(shard).to_contain_text("no owner")
    expect(shard).to_contain_text("not served")
    expect(ui.page.locator("[data-node='node-0']")).to_contain_text("has not responded for 1,234 s")
    for text in ("1 of 2 shards not served", "no synchronous standby is connected"):
        expect(status).to_contain_text(text)


def test_long_problem_is_readable_on_a_phone(ui: Pages) -> None:
    ui.page.set_viewport_size({"width": 390, "height": 780})
    problem = "no synchronous standby is connected, and nothing can be acknowledged until one is."
    body = json.dumps({"cluster": STATE | {"problem": problem}})
    ui.page.route("**/__ds/cluster", lambda route: route.fulfill(content_type="application/json", body=body))
    ui.open("#/cluster")
    badge = ui.page.locator("#cluster-status .bad", has_text=problem)
    expect(badge).to_be_visible()
    box = badge.bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 390
