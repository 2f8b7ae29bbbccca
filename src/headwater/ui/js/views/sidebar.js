// The list of streams with its filter, and the links to the other views.

import { Address } from "../client.js";
import { button, h, icon, replace, select } from "../dom.js";
import { folderRows, ordered, ORDERS } from "../folders.js";
import { count, plural } from "../format.js";
import { Metadata } from "../metadata.js";
import { parseOffset } from "../messages.js";
import { LISTING } from "../registry.js";
import { listing } from "../store.js";
import { VirtualList } from "../virtual.js";
import { followHash } from "./folder.js";
import { streamBadges } from "./badges.js";

const ROW_PX = 44;
const HEADS_DELAY_MS = 150;

const VIEWS = [
  ["#/", "Streams"],
  ["#/buckets", "Buckets"],
  ["#/subscriptions", "Subscriptions"],
  ["#/pipeline", "Pipeline"],
  ["#/cluster", "Cluster"],
];

/** Parse a typed address: a name, a path or a URL. */
export function typedAddress(text, base) {
  let path = text.trim();
  if (path.startsWith(base)) path = path.slice(base.length);
  path = path.split("?")[0];
  const decoded = (piece) => {
    try {
      return decodeURIComponent(piece);
    } catch {
      return piece;
    }
  };
  if (path.startsWith("/ds/")) {
    const [bucket, ...rest] = path.slice(4).split("/");
    if (rest.length > 0) return new Address(decoded(rest.join("/")), bucket);
  }
  if (path.startsWith("/v1/stream/")) return new Address(path.slice(11).split("/").map(decoded).join("/"));
  return new Address(path.replace(/^\/+|\/+$/g, ""));
}

export class Sidebar {
  constructor(app, element) {
    this.app = app;
    this.shown = [];
    this.open = new Set();
    this.style = listing.get();
    this.metadata = new Metadata(app.client, () => this.#redraw());
    this.status = h("button", { class: "status", type: "button", id: "connection", onclick: () => app.openConnection() });
    this.summary = h("span", { class: "muted", id: "stream-count" });
    this.filter = h("input", {
      type: "search",
      id: "filter",
      placeholder: "Filter, or enter a path",
      autocomplete: "off",
      spellcheck: "false",
      "aria-label": "Filter streams, or enter a path and press Enter",
      oninput: () => {
        this.list.element.scrollTop = 0;
        this.#refilter();
      },
      onkeydown: (event) => this.#filterKey(event),
    });
    this.list = new VirtualList({
      rowHeight: ROW_PX,
      label: "Streams",
      id: "streams",
      render: (index) => this.#row(index),
      onopen: (index) => this.#openRow(index),
      onscroll: () => this.#requestHeadsLater(),
    });
    this.links = VIEWS.map(([hash, label]) => h("a", { href: hash, text: label, hidden: hash === "#/cluster" }));
    this.notice = h("div", { class: "notice", hidden: true });
    this.empty = h("div", { class: "empty", hidden: true, id: "no-streams" }, h("p", { text: "No streams yet." }), h("p", { class: "muted", text: "A stream is a log with a URL. Create one here, with curl, or with headwater create." }), button("Create the first stream", () => app.openCreate({ name: "demo" }), { symbol: "plus", kind: "primary" }));
    this.order = select(ORDERS, this.style.order, { "aria-label": "Order", id: "order", class: "small", onchange: () => this.#restyle({ order: this.order.value }) });
    this.folders = button("", () => this.#restyle({ folders: !this.style.folders }), { symbol: "folder", kind: "quiet small", title: "Group by folder", id: "folders" });
    this.folders.setAttribute("aria-pressed", String(this.style.folders));
    replace(
      element,
      h(
        "header",
        { class: "side-head" },
        h("a", { class: "brand", href: "#/" }, icon("wave"), h("span", { text: "Headwater" })),
        h("div", { class: "row" }, [
          button("", () => app.toggleTheme(), { symbol: "moon", kind: "quiet", title: "Light or dark colours (t)", id: "theme" }),
          button("", () => app.openRequests(), { symbol: "log", kind: "quiet", title: "Requests (r)", id: "requests" }),
          button("", () => app.openHelp(), { symbol: "help", kind: "quiet", title: "Keys (?)", id: "help" }),
        ]),
      ),
      this.status,
      h("nav", { "aria-label": "Views" }, this.links),
      h("div", { class: "filter-row" }, h("div", { class: "search" }, icon("search"), this.filter), button("New", () => app.openCreate(), { symbol: "plus", kind: "primary", title: "New stream (n)", id: "new-stream" })),
      h("div", { class: "list-head" }, this.summary, this.order, this.folders, button("", () => app.copyCurl({ path: LISTING }), { symbol: "terminal", kind: "quiet small", title: "Copy the request for this list as curl" })),
      this.notice,
      this.empty,
      this.list.element,
    );
    this.timer = setInterval(() => this.#requestHeadsLater(), 5000);
  }

  stop() {
    clearInterval(this.timer);
  }

  /** Show or hide the link to the cluster: most servers are not a node of one. */
  showCluster(isNode) {
    this.links.at(-1).hidden = !isNode;
  }

  route(hash) {
    const view = hash.startsWith("#/bucket") ? "#/buckets" : hash.startsWith("#/subscription") ? "#/subscriptions" : hash.startsWith("#/pipeline") ? "#/pipeline" : hash.startsWith("#/cluster") ? "#/cluster" : "#/";
    for (const link of this.links) link.setAttribute("aria-current", link.getAttribute("href") === view ? "page" : "false");
    this.current = hash.split("?")[0];
    this.#redraw();
  }

  /** Update the list after a change of the registry, at most a few times per second. */
  update() {
    if (this.updating) return;
    this.updating = setTimeout(() => {
      this.updating = null;
      this.#refilter();
    }, 100);
  }

  connection({ state, error }, base) {
    const names = { live: "connected", "catching-up": "loading streams", opening: "connecting", reconnecting: "reconnecting", failed: error?.status === 401 || error?.status === 403 ? "token needed" : "no list", paused: "paused while hidden", ended: "registry closed", stopped: "stopped" };
    const kinds = { live: "good", reconnecting: "warn", failed: error?.status === 404 ? "plain" : "bad" };
    replace(this.status, h("span", { class: `dot ${kinds[state] || "plain"}` }), h("span", { class: "grow ellipsis", text: base.replace(/^https?:\/\//, "") }), h("span", { class: "muted", text: names[state] || state }));
    this.status.title = `${base}: ${names[state] || state}. Click to change the URL or the token.`;
    this.status.dataset.state = state;
    const refused = state === "failed" && error;
    this.notice.hidden = !refused;
    if (refused) {
      const why =
        error.status === 404
          ? "This server cannot list its streams. Enter a path above to open a stream."
          : error.status === 401 || error.status === 403
            ? "The server requires a token, or this token does not allow reading the list of streams."
            : error.message;
      replace(this.notice, h("p", { text: why }), (error.status === 401 || error.status === 403) && button("Use a token", () => this.app.openToken(), { symbol: "lock", kind: "primary small", id: "side-token" }));
    }
  }

  #restyle(change) {
    this.style = { ...this.style, ...change };
    listing.set(this.style);
    this.folders.setAttribute("aria-pressed", String(this.style.folders));
    this.list.element.scrollTop = 0;
    this.#refilter();
  }

  #openRow(index) {
    const row = this.shown[index];
    if (row?.folder === undefined) {
      this.app.go(this.#address(index).hash);
      return;
    }
    if (!this.open.delete(row.folder)) this.open.add(row.folder);
    this.#refilter();
  }

  get #words() {
    return this.filter.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
  }

  #refilter() {
    const { names } = this.app.registry;
    const words = this.#words;
    const typed = this.filter.value.trim();
    const { streams } = this.app.registry;
    // A copy, because the registry can change before the rows are drawn.
    const matching = words.length === 0 ? names : names.filter((name) => {
      const lower = name.toLowerCase();
      return words.every((word) => lower.includes(word));
    });
    const inOrder = ordered(matching, streams, this.style.order);
    this.shown = this.style.folders && words.length === 0 ? folderRows(inOrder, this.open) : inOrder.map((name) => ({ name, depth: 0 }));
    this.empty.hidden = !(names.length === 0 && typed === "" && this.app.registry.state === "live");
    // A typed path can be opened even if it is not listed.
    this.extra = typed !== "" && !this.app.registry.streams.has(typed) ? typed : null;
    this.summary.textContent = words.length === 0 ? plural(names.length, "stream") : `${count(matching.length)} of ${count(names.length)}`;
    this.list.setCount(this.shown.length + (this.extra === null ? 0 : 1));
    this.#redraw();
  }

  #redraw() {
    if (this.drawing) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = 0;
      this.list.refresh();
    });
  }

  #address(index) {
    if (index >= this.shown.length) return typedAddress(this.extra, this.app.client.base);
    return new Address(this.shown[index].name ?? this.shown[index].folder);
  }

  #row(index) {
    const address = this.#address(index);
    if (index >= this.shown.length) {
      return h("div", { class: "row-item open-typed" }, h("div", { class: "name ellipsis" }, "Open ", h("b", { text: address.title })), h("div", { class: "badges" }, h("span", { class: "muted", text: address.path })));
    }
    const row = this.shown[index];
    const style = row.depth > 0 ? `--depth: ${row.depth}` : null;
    if (row.folder !== undefined) {
      return h("div", { class: "row-item folder", title: row.folder, style, "aria-expanded": String(row.isOpen) }, h("div", { class: "name ellipsis" }, icon("folder"), row.folder.slice(0, -1).split("/").at(-1)), h("div", { class: "badges" }, h("span", { class: "badge plain", text: plural(row.count, "stream") }), followLink(row.folder)));
    }
    const listed = this.app.registry.streams.get(address.name);
    const info = withListed(this.metadata.get(address), listed);
    const name = row.depth > 0 ? address.name.split("/").slice(row.depth).join("/") : address.title;
    return h(
      "div",
      { class: `row-item${address.hash === this.current ? " current" : ""}`, title: address.title, style },
      h("div", { class: "name ellipsis", text: name }),
      h("div", { class: "badges" }, streamBadges(listed?.type, info)),
    );
  }

  #requestHeadsLater() {
    clearTimeout(this.headsTimer);
    this.headsTimer = setTimeout(() => {
      if (document.visibilityState === "hidden") return;
      const [first, last] = this.list.visible;
      const wanted = [];
      for (let index = first; index < Math.min(last, this.shown.length); index += 1) if (this.#needsHead(this.shown[index])) wanted.push(this.#address(index));
      this.metadata.want(wanted);
    }, HEADS_DELAY_MS);
  }

  /** The list of a server without tails needs a request for each visible row. */
  #needsHead({ name, folder }) {
    return folder === undefined && !this.app.registry.streams.get(name)?.tail;
  }

  #filterKey(event) {
    if (event.key === "Enter" && this.filter.value.trim()) {
      event.preventDefault();
      const typed = this.filter.value.trim();
      const exact = this.app.registry.streams.has(typed);
      const index = exact ? this.shown.findIndex((row) => row.name === typed) : this.shown.length === 1 ? 0 : this.shown.length;
      this.app.go(this.#address(Math.max(0, index)).hash);
    } else if (event.key === "ArrowDown") {
      event.preventDefault();
      this.list.element.focus();
      this.list.select(0);
    } else if (event.key === "Escape") {
      this.filter.value = "";
      this.#refilter();
    }
  }
}

function followLink(folder) {
  return h("a", { class: "badge", href: followHash(folder), text: "follow", title: `New messages of all streams in ${folder}` });
}

/** What the list says is newer than what was asked for a while ago. */
function withListed(info, listed) {
  if (!listed?.tail) return info;
  const tail = parseOffset(listed.tail);
  const current = { ...info, ...listed };
  return tail === null ? current : { ...current, frames: true, tail: listed.tail, messages: tail.index };
}
