// The start page: key figures of the server, and the first commands to try.

import { button, copy, field, form, h, replace } from "../dom.js";
import { bytes, count } from "../format.js";
import { session } from "../store.js";

const POLL_MS = 3000;
/** Prints a token for everything: the list of streams and the pipeline have reserved names. */
export const ADMIN_TOKEN = "headwater token --scope streams:admin";
const SHOWN = [
  ["headwater_streams", "streams", count],
  ["headwater_payload_bytes", "stored", bytes],
  ["headwater_appends_total", "appends", count],
  ["headwater_read_bytes_total", "read", bytes],
  ["headwater_live_readers", "live readers", count],
  ["headwater_connections", "connections", count],
];

export class HomeView {
  constructor(app) {
    this.app = app;
    this.values = new Map();
    this.numbers = h("div", { class: "tiles", id: "numbers" });
    this.access = h("section", { class: "card", hidden: true, id: "token-card" });
    const base = app.client.base;
    const commands = [
      ["Create", { method: "PUT", path: "/v1/stream/demo", headers: { "Content-Type": "application/json" } }],
      ["Append", { method: "POST", path: "/v1/stream/demo", headers: { "Content-Type": "application/json" }, body: '{"hello":"world"}' }],
      ["Follow", { path: "/v1/stream/demo", query: { offset: "-1", live: "sse" }, live: true }],
    ];
    this.element = h(
      "article",
      { class: "page home" },
      h("header", { class: "view-head" }, h("h1", { text: "Streams" }), h("p", { class: "muted" }, "Append-only logs with URLs. Select a stream on the left, enter a path, or create one. Server: ", h("code", { text: base }))),
      this.access,
      this.numbers,
      h(
        "section",
        { class: "card" },
        h("h2", { text: "Try it" }),
        commands.map(([name, request]) => h("div", { class: "command" }, h("span", { class: "muted", text: name }), h("code", { class: "mono grow", text: app.client.curl(request) }), button("", () => app.copyCurl(request), { symbol: "copy", kind: "quiet small", title: `Copy: ${name}` }))),
        h("p", { class: "muted" }, "New streams appear on the left automatically. ", h("a", { href: "#/follow/", id: "follow-all", text: "Follow all streams" }), " shows new messages of all of them, over one connection."),
      ),
      h("section", { class: "card" }, h("h2", { text: "Keys" }), h("p", { class: "muted" }, "Press ", h("kbd", { text: "?" }), " for all keys, ", h("kbd", { text: "/" }), " to filter, ", h("kbd", { text: "n" }), " for a new stream.")),
    );
    this.#load();
    this.timer = setInterval(() => document.visibilityState === "visible" && this.#load(), POLL_MS);
  }

  stop() {
    this.stopped = true;
    clearInterval(this.timer);
  }

  /** A page behind a proxy starts here: paste a token. */
  #drawAccess() {
    const { error } = this.app.registry;
    const isRefused = error?.status === 401 || error?.status === 403;
    this.access.hidden = !isRefused;
    if (!isRefused || this.access.childElementCount > 0) return;
    const token = h("input", { id: "home-token", class: "mono", type: "password", autocomplete: "off", placeholder: "paste the token here" });
    const keep = h("input", { type: "checkbox", checked: true });
    const connect = () => {
      session.set(this.app.client.base === this.app.home ? null : this.app.client.base, token.value.trim(), keep.checked);
      this.app.connect(this.app.client.base, token.value.trim());
    };
    replace(
      this.access,
      h("h2", { text: error.status === 401 ? "This server requires a token" : "This token does not allow reading the list of streams" }),
      error.status === 403 && h("p", { class: "muted" }, "Its streams can be opened by their path. The list, subscriptions and the pipeline need the scope ", h("code", { text: "streams:admin" }), "."),
      h("p", { class: "muted" }, "For a stack that was started with ", h("code", { text: "make up" }), " or ", h("code", { text: "headwater up" }), ", this command prints one that allows everything: ", h("code", { class: "mono", text: ADMIN_TOKEN }), " (in a clone: ", h("code", { class: "mono", text: `.venv/bin/${ADMIN_TOKEN}` }), ") ", button("", () => copy(ADMIN_TOKEN, "Command copied"), { symbol: "copy", kind: "quiet small", title: "Copy the command" })),
      form({ class: "row wrap", onsubmit: connect }, field("Token", token), h("label", { class: "check" }, keep, " keep it until this tab is closed"), button("Connect", undefined, { kind: "primary", type: "submit", id: "home-connect" })),
    );
  }

  /** The list of streams has changed, or its state. */
  listed() {
    this.#drawAccess();
    this.#drawNumbers();
  }

  async #load() {
    let text = "";
    try {
      text = await (await this.app.client.expect({ path: "/metrics", quiet: true })).text();
    } catch {
      // A proxy may not give access to the metrics.
    }
    if (this.stopped) return;
    const values = new Map();
    for (const line of text.split("\n")) {
      const found = /^(\w+)(?:\{[^}]*\})? ([0-9.e+-]+)$/i.exec(line);
      if (found) values.set(found[1], (values.get(found[1]) || 0) + Number(found[2]));
    }
    this.values = values;
    this.listed();
  }

  #drawNumbers() {
    const { values } = this;
    // The figure of the metrics includes streams of the server itself; this one agrees with the list.
    if (this.app.registry.state === "live" && values.has("headwater_streams")) values.set("headwater_streams", this.app.registry.names.length);
    replace(
      this.numbers,
      SHOWN.filter(([name]) => values.has(name)).map(([name, label, format]) => h("div", { class: "tile" }, h("b", { text: format(values.get(name)) }), h("span", { class: "muted", text: label }))),
    );
  }
}
