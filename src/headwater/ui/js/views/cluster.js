// The nodes and shards of a cluster, as `headwater cluster status` shows them, with the cache and the object store of each shard.

import { explain } from "../client.js";
import { badge, button, h, replace } from "../dom.js";
import { bytes, count, plural } from "../format.js";

export const CLUSTER = "/v1/stream/__ds/cluster";
const POLL_MS = 2000;

/** The state of the cluster; null if the server is not a node of one. */
export async function clusterOf(client) {
  return (await client.json({ path: CLUSTER, quiet: true })).cluster;
}

const row = (cells, tag = "td", props = {}) => h("tr", props, cells.map((cell) => h(tag, {}, cell)));

function nodeState(node) {
  if (!node.responds) return badge(`has not responded for ${count(Math.round(node.silent_s))} s`, "bad");
  return node.leaves ? badge("drains", "warn") : badge("takes shards", "good");
}

export class ClusterView {
  constructor(app) {
    this.app = app;
    this.status = h("div", { class: "badges", id: "cluster-status" });
    this.body = h("div", { class: "stack pad-x", id: "cluster" });
    this.element = h(
      "article",
      { class: "page" },
      h("header", { class: "view-head" }, h("div", { class: "row" }, button("", () => app.go("#/"), { symbol: "back", kind: "quiet only-phone", title: "All streams" }), h("h1", { class: "grow", text: "Cluster" }), button("curl", () => app.copyCurl({ path: CLUSTER }), { symbol: "terminal", kind: "quiet" })), h("p", { class: "muted", text: "Nodes share the shards. What a shard has written since its last pack is in the journal in Postgres; packs are in the object store." }), this.status),
      this.body,
    );
    this.#load();
    this.timer = setInterval(() => document.visibilityState === "visible" && this.#load(), POLL_MS);
  }

  stop() {
    clearInterval(this.timer);
    this.isStopped = true;
  }

  async #load() {
    try {
      const found = await clusterOf(this.app.client);
      if (!this.isStopped) this.#draw(found);
    } catch (error) {
      if (!this.isStopped) replace(this.status, badge(explain(error), "bad"));
    }
  }

  #draw(cluster) {
    if (cluster === null) {
      replace(this.status);
      replace(this.body, h("div", { class: "empty", id: "no-cluster" }, h("p", { text: "This server is not a node of a cluster." })));
      return;
    }
    const idle = cluster.shards.filter((shard) => !shard.is_serving).length;
    replace(
      this.status,
      badge(cluster.name, "plain"),
      badge(plural(cluster.nodes.length, "node"), "plain"),
      badge(idle ? `${idle} of ${plural(cluster.shards.length, "shard")} not served` : `${plural(cluster.shards.length, "shard")} served`, idle ? "bad" : "good"),
      badge(cluster.problem ? `Postgres: ${cluster.problem}` : "Postgres replicates", cluster.problem ? "bad" : "good"),
    );
    replace(
      this.body,
      h("h2", { text: "Nodes" }),
      h("div", { class: "table-scroll" }, h("table", { class: "data", id: "cluster-nodes" }, row(["Node", "Address", "Shards", "Standbys of", "Clock", "State"], "th"), cluster.nodes.map((node) => row([node.name, node.address, count(node.shards), node.warm.join(", ") || "–", `${node.clock_ahead_s > 0 ? "+" : ""}${node.clock_ahead_s} s`, nodeState(node)], "td", { data: { node: node.name } })))),
      h("h2", { text: "Shards" }),
      h("div", { class: "table-scroll" }, h("table", { class: "data", id: "cluster-shards" }, row(["Shard", "Owner", "State", "Epoch", "Record", "Messages", "Not in the store yet", "In the store", "Cached"], "th"), cluster.shards.map((shard) => this.#shard(shard)))),
    );
  }

  #shard(shard) {
    const figures = shard.figures ?? {};
    const state = shard.is_serving ? badge("served", "good") : badge("not served", "bad");
    const journal = `${bytes(shard.journal_bytes)} in ${plural(shard.journal_batches, "batch").replace("batchs", "batches")}`;
    return row([count(shard.id), shard.owner ?? "no owner", state, count(shard.epoch), count(shard.seq), bytes(figures.payload_bytes), journal, `${bytes(figures.cold_bytes)} in ${plural(figures.cold_objects, "object")}`, bytes(figures.cold_cached_bytes)], "td", { data: { shard: shard.id } });
  }
}
