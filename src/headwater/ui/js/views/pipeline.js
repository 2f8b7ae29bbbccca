// The state of the pipeline: Spark queries and Postgres slots, folded from the stream `__pipeline__`.
// docs/spark.md describes the events.

import { Address, explain } from "../client.js";
import { badge, button, h, replace } from "../dom.js";
import { Fold } from "../fold.js";
import { ago, bytes, count, span } from "../format.js";
import { parse, plain } from "../json.js";
import { StreamReader } from "../reader.js";
import { ADMIN_TOKEN } from "./home.js";

export const PIPELINE = "__pipeline__";
const SILENT_MS = 60_000; // the same limit as in `headwater status`
const HISTORY = 60;
const LSN = /^[0-9A-F]+\/[0-9A-F]+$/;

export class PipelineView {
  constructor(app) {
    this.app = app;
    this.fold = new Fold();
    this.history = new Map();
    this.body = h("div", { class: "stack", id: "pipeline" });
    this.status = h("div", { class: "badges", id: "pipeline-status" });
    const address = new Address(PIPELINE);
    this.element = h(
      "article",
      { class: "page" },
      h("header", { class: "view-head" }, h("div", { class: "row" }, button("", () => app.go("#/"), { symbol: "back", kind: "quiet only-phone", title: "All streams" }), h("h1", { class: "grow", text: "Pipeline" }), button("Events", () => app.go(address.hash), { symbol: "log", kind: "quiet" }), button("curl", () => app.copyCurl({ path: address.path, query: { offset: "-1", live: "sse" }, live: true }), { symbol: "terminal", kind: "quiet" })), h("p", { class: "muted", text: "Spark queries and Postgres slots that report their state to this server." }), this.status),
      this.body,
    );
    this.#open();
    this.timer = setInterval(() => this.#draw(), 1000);
  }

  stop() {
    clearInterval(this.timer);
    clearTimeout(this.again);
    this.reader.stop();
  }

  #open(from = "-1") {
    this.reader?.stop();
    this.fold = new Fold();
    this.reader = new StreamReader(this.app.client, new Address(PIPELINE), {
      from,
      quiet: true,
      onmessages: (messages) => this.#received(messages),
      onstate: (reader) => {
        // The reason for an absent pipeline stays on the page while it is tried again.
        if (reader.state === "failed" || reader.state === "live") this.error = reader.state === "failed" ? reader.error : null;
        if (reader.state === "failed" || reader.state === "ended") {
          clearTimeout(this.again);
          // Retention drops old events. Each job reports its full state regularly, so none are needed.
          const earliest = reader.error?.earliest;
          this.again = setTimeout(() => this.#open(earliest || "-1"), earliest ? 0 : 3000);
        }
        this.#draw();
      },
    }).start();
  }

  #received(messages) {
    for (const message of messages) {
      let changed = null;
      try {
        changed = this.fold.apply(parse(message.text), message);
      } catch {
        continue;
      }
      if (changed?.type !== "query") continue;
      const entity = this.fold.tables.get("query")?.get(changed.key);
      const rate = entity ? Number(plain(entity.value)?.input_rows_per_s) : NaN;
      if (Number.isNaN(rate)) continue;
      const past = this.history.get(changed.key) ?? [];
      past.push(rate);
      if (past.length > HISTORY) past.shift();
      this.history.set(changed.key, past);
    }
    this.#draw();
  }

  #values(type) {
    return [...(this.fold.tables.get(type) ?? new Map())].map(([key, entity]) => [key, asObject(plain(entity.value))]).sort(([a], [b]) => (a < b ? -1 : 1));
  }

  #draw() {
    const { reader } = this;
    const queries = this.#values("query");
    const slots = this.#values("slot");
    const { error } = this;
    const isRefused = error?.status === 401 || error?.status === 403;
    replace(this.status, error?.status === 404 ? badge("none", "plain") : isRefused ? badge("token needed", "warn") : badge(reader.state, reader.state === "live" ? "good" : "plain"));
    if (queries.length + slots.length === 0) {
      const why = error ? explain(error) : "No pipeline has reported yet.";
      // Not drawn again while nothing changes: a click on its button would be lost.
      if (this.body.firstElementChild?.dataset.why !== why) replace(this.body, this.#absent(error, isRefused, why));
      return;
    }
    const failed = [...queries, ...slots].filter(([, value]) => value.error);
    replace(
      this.body,
      failed.length > 0 && h("section", { class: "card bad", id: "pipeline-failures" }, h("h2", { text: "Errors" }), failed.map(([key, value]) => h("p", {}, h("b", { class: "mono", text: key }), ": ", asObject(value.error).message ?? String(value.error), h("span", { class: "muted", text: ` ${ago(asObject(value.error).at_ms ?? value.updated_at_ms)}` })))),
      queries.length > 0 && h("h2", { class: "pad-x", text: "Queries" }),
      h("div", { class: "cards" }, queries.map(([key, value]) => this.#query(key, value))),
      slots.length > 0 && h("h2", { class: "pad-x", text: "Postgres slots" }),
      h("div", { class: "cards" }, slots.map(([key, value]) => slotCard(key, value))),
    );
    for (const canvas of this.body.querySelectorAll("canvas[data-key]")) sparkline(canvas, this.history.get(canvas.dataset.key) ?? []);
  }

  #absent(error, isRefused, why) {
    const advice = isRefused
      ? [
          h("p", { class: "muted" }, "The state of the pipeline is in the stream ", h("code", { text: PIPELINE }), ". Behind the proxy of a stack, reading it needs a token with the scope ", h("code", { text: "streams:admin" }), ", which ", h("code", { class: "mono", text: ADMIN_TOKEN }), " prints."),
          h("p", {}, button("Use a token", () => this.app.openToken(), { symbol: "lock", kind: "primary", id: "pipeline-token" })),
        ]
      : h("p", { class: "muted" }, "Start one with ", h("code", { text: "headwater sync" }), " or ", h("code", { text: "headwater up --profile sync" }), ". It then reports each Spark query and replication slot to the stream ", h("code", { text: PIPELINE }), ", and this page shows them.");
    return h("div", { class: "empty", id: "pipeline-absent", "data-why": why }, h("p", { text: error?.status === 404 ? "No pipeline reports to this server." : why }), advice);
  }

  #query(key, value) {
    const reported = Object.entries(asObject(value.offsets));
    // A query that reads Postgres has a position in the WAL there instead of the offsets of streams.
    const wal = reported.find(([name, at]) => name === "lsn" && LSN.test(at));
    const offsets = reported.filter((entry) => entry !== wal);
    return h(
      "section",
      { class: "card", "data-query": key },
      h("div", { class: "row" }, h("h2", { class: "mono ellipsis grow", text: value.name ?? key }), healthBadge(value)),
      h("p", { class: "muted ellipsis", text: [value.source, value.target].filter(Boolean).join(" → ") }),
      h("canvas", { class: "spark", "data-key": key, role: "img", "aria-label": "Input rate" }),
      facts([
        ["input", `${count(Math.round(value.input_rows_per_s ?? 0))} rows/s`],
        ["batch", `${value.batch ?? "–"}${value.batch_ms !== undefined ? ` in ${span(Number(value.batch_ms))}` : ""}`],
        ...(wal ? [["position", wal[1]]] : []),
        ["lag", value.lag_messages === undefined || value.lag_messages === null ? "–" : `${count(value.lag_messages)} messages`],
        ["updated", ago(value.updated_at_ms)],
      ]),
      offsets.length > 0 && h("details", {}, h("summary", { text: `last offset of ${offsets.length === 1 ? offsets[0][0] : `${offsets.length} streams`}` }), h("table", { class: "headers" }, h("tbody", {}, offsets.slice(0, 100).map(([stream, offset]) => h("tr", {}, h("th", { scope: "row" }, h("a", { href: new Address(stream).hash, text: stream })), h("td", { class: "mono", text: String(offset) })))))),
    );
  }
}

function slotCard(key, value) {
  return h(
    "section",
    { class: "card", "data-slot": key },
    h("div", { class: "row" }, h("h2", { class: "mono ellipsis grow", text: key }), healthBadge(value)),
    h("p", { class: "muted ellipsis", text: value.database ?? "" }),
    facts([
      ["lag", value.lag_bytes === undefined ? "–" : bytes(Number(value.lag_bytes))],
      ["confirmed", value.confirmed_lsn ?? "–"],
      ["server at", value.current_lsn ?? "–"],
      ["updated", ago(value.updated_at_ms)],
    ]),
  );
}

function healthBadge(value) {
  if (value.error || value.status === "failed") return badge("failed", "bad");
  if (value.status === "stopped") return badge("stopped", "closed");
  if (value.updated_at_ms && Date.now() - value.updated_at_ms > SILENT_MS) return badge("silent", "warn", "It has not reported for more than a minute.");
  return badge(value.status ?? "running", "good");
}

function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.map(([name, value]) => [h("dt", { text: name }), h("dd", { text: value })]));
}

function asObject(value) {
  return value !== null && typeof value === "object" ? value : {};
}

function sparkline(canvas, values) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (width === 0) return;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const most = Math.max(1, ...values);
  const style = getComputedStyle(canvas);
  context.strokeStyle = style.getPropertyValue("--accent");
  context.lineWidth = 1.5;
  context.beginPath();
  values.forEach((value, at) => {
    const x = (width * (at + HISTORY - values.length)) / (HISTORY - 1);
    const y = height - 2 - (value / most) * (height - 4);
    if (at === 0) context.moveTo(x, y);
    else context.lineTo(x, y);
  });
  context.stroke();
}
