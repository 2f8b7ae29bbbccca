// The messages of all streams of a folder, as they arrive, over one connection.

import { Address, explain } from "../client.js";
import { badge, button, h, replace } from "../dom.js";
import { count, plural, when } from "../format.js";
import { FOLLOW, ManyReader } from "../many_reader.js";
import { VirtualList } from "../virtual.js";

const ROW_PX = 26;
const HIDDEN_MS = 20_000;
const KEPT_MAX = 5000;
const KEPT_LESS = 4000; // old messages are dropped in larger steps
const STATES = { opening: ["connecting", "plain"], live: ["live", "good"], paused: ["paused", "warn"], reconnecting: ["reconnecting", "warn"], failed: ["failed", "bad"] };

export function followHash(prefix) {
  return `#/follow/${prefix.split("/").map(encodeURIComponent).join("/")}`;
}

export class FolderView {
  constructor(app, prefix) {
    this.app = app;
    this.prefix = prefix;
    this.rows = [];
    this.received = 0;
    this.seen = new Set();
    this.status = h("div", { class: "status-line", id: "folder-status" });
    this.problem = h("div", { class: "notice", hidden: true });
    this.empty = h("div", { class: "empty", id: "folder-empty" }, h("p", { text: "New messages of all these streams appear here." }), h("p", { class: "muted", text: "Streams that are created later are included." }));
    this.list = new VirtualList({ rowHeight: ROW_PX, label: "Messages", id: "folder-messages", render: (index) => this.#row(this.rows[index]), onopen: (index) => app.go(this.rows[index].address.hash) });
    this.pauseButton = button("Pause", () => this.#toggle(), { symbol: "pause", kind: "quiet", id: "folder-pause" });
    const request = { method: "POST", path: FOLLOW, headers: { "Content-Type": "application/json" }, body: JSON.stringify({ prefix, start: "now" }) };
    this.element = h(
      "article",
      { class: "stream-view" },
      h(
        "header",
        { class: "view-head" },
        h("div", { class: "row" }, button("", () => app.go("#/"), { symbol: "back", kind: "quiet only-phone", title: "All streams" }), h("h1", { class: "grow ellipsis", id: "folder-title", text: prefix === "" ? "All streams" : prefix }), this.pauseButton, button("curl", () => app.copyCurl(request), { symbol: "terminal", kind: "quiet", title: "Copy the request as curl; a GET of the id in its answer follows the streams" })),
      ),
      h("div", { class: "status-row" }, this.status),
      this.problem,
      h("div", { class: "split" }, h("div", { class: "list-pane" }, h("div", { class: "columns message-row of-many", "aria-hidden": "true" }, h("span", { class: "time", text: "received" }), h("span", { text: "stream" }), h("span", { text: "message" })), this.list.element, this.empty)),
    );
    this.onvisibility = () => this.#visible(document.visibilityState === "visible");
    document.addEventListener("visibilitychange", this.onvisibility);
    this.#draw();
    this.listed();
  }

  stop() {
    this.stopped = true;
    clearTimeout(this.hiding);
    document.removeEventListener("visibilitychange", this.onvisibility);
    this.reader?.stop();
  }

  /** The list of streams has changed. What it says first is where this view begins. */
  listed() {
    const { registry } = this.app;
    if (registry.state === "live" && !this.reader) {
      const offsets = new Map();
      for (const [name, { tail }] of registry.streams) if (tail && name.startsWith(this.prefix)) offsets.set(name, tail);
      this.reader = new ManyReader(this.app.client, this.prefix, offsets, { onmessages: (name, messages) => this.#add(name, messages), onstate: () => this.#draw() }).start();
    }
    this.#draw();
  }

  /** A hidden tab releases its connection, and continues where it was. */
  #visible(isVisible) {
    clearTimeout(this.hiding);
    if (isVisible && this.isHidden) {
      this.isHidden = false;
      this.reader.start();
    } else if (!isVisible) {
      this.hiding = setTimeout(() => {
        this.isHidden = this.reader !== undefined && this.reader.state !== "paused";
        if (this.isHidden) this.reader.pause();
      }, HIDDEN_MS);
    }
  }

  #toggle() {
    if (!this.reader) return;
    if (this.reader.state === "paused") this.reader.start();
    else this.reader.pause();
    this.#draw();
  }

  #add(name, messages) {
    if (this.prefix === "" && name.startsWith("__")) return; // streams of the server itself
    const address = new Address(name);
    const wasAtEnd = this.list.atEnd;
    this.received += messages.length;
    this.seen.add(name);
    for (const message of messages) this.rows.push({ address, message });
    if (this.rows.length > KEPT_MAX) {
      const taken = this.rows.length - KEPT_LESS;
      this.rows.splice(0, taken);
      this.list.setCount(this.rows.length);
      this.list.shift(taken);
    } else this.list.setCount(this.rows.length);
    if (wasAtEnd) this.list.toEnd();
    this.empty.hidden = true;
    this.#draw();
  }

  #row({ address, message }) {
    const link = h("a", { class: "mono ellipsis", href: address.hash, text: address.title, title: address.title });
    return h("div", { class: "message-row of-many is-live" }, h("span", { class: "mono muted time", text: when(message.at), title: new Date(message.at).toISOString() }), link, h("span", { class: "mono ellipsis preview", text: message.preview("json") }));
  }

  #draw() {
    if (this.drawing || this.stopped) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = 0;
      const { reader, app } = this;
      const state = reader?.state ?? "opening";
      const [label, kind] = STATES[state] ?? [state, "plain"];
      const streams = app.registry.names.filter((name) => name.startsWith(this.prefix)).length;
      replace(this.status, badge(label, kind), h("span", { class: "muted", text: `${plural(streams, "stream")} over one connection · ${plural(this.received, "message")} of ${count(this.seen.size)} of them` }));
      this.status.dataset.state = state;
      this.status.dataset.received = this.received;
      this.pauseButton.lastChild.textContent = state === "paused" ? "Continue" : "Pause";
      this.problem.hidden = !reader?.error;
      if (reader?.error) this.problem.textContent = explain(reader.error);
    });
  }
}
