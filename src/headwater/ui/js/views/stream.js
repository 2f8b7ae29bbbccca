// One stream: its properties, its actions and its tabs.

import { explain } from "../client.js";
import { button, copy, h, replace, toast } from "../dom.js";
import { describe } from "../reader.js";
import { headerTable } from "./answer.js";
import { AppendBox } from "./append.js";
import { streamBadges } from "./badges.js";
import { openClose, openCreate, openDelete, openFork } from "./dialogs.js";
import { MessagesView } from "./messages.js";
import { SnapshotsView } from "./snapshots.js";
import { StateView } from "./state.js";

const REFRESH_MS = 5000;
const KEYS = ["a", "1", "2", "3", "4", "f", "p", "s"]; // keys of this view and of its messages

export class StreamView {
  constructor(app, address, query) {
    this.app = app;
    this.address = address;
    this.query = query;
    this.tab = null;
    this.pressed = []; // keys that were pressed while the stream was being opened
    this.badges = h("div", { class: "badges", id: "stream-badges" });
    this.actions = h("div", { class: "row wrap actions" });
    this.tabs = h("div", { class: "tabs", role: "tablist" });
    this.body = h("div", { class: "tab-body" });
    this.below = h("div", { class: "below", hidden: true });
    this.element = h(
      "article",
      { class: "stream-view" },
      h(
        "header",
        { class: "view-head" },
        h("div", { class: "row" }, button("", () => app.go("#/"), { symbol: "back", kind: "quiet only-phone", title: "All streams" }), h("h1", { class: "ellipsis", text: address.title, title: address.title, id: "stream-title" }), button("", () => copy(app.client.url(address.path), "URL copied"), { symbol: "copy", kind: "quiet", title: "Copy the URL of the stream" }), this.badges),
        this.actions,
      ),
      this.tabs,
      this.body,
      this.below,
    );
    this.#load();
  }

  stop() {
    this.stopped = true;
    clearInterval(this.timer);
    this.view?.stop?.();
  }

  async #load() {
    replace(this.body, h("p", { class: "muted pad", text: "Opening…" }));
    try {
      this.info = await describe(this.app.client, this.address);
    } catch (error) {
      if (!this.stopped) this.#missing(error);
      return;
    }
    if (this.stopped) return;
    this.#drawHead();
    this.#drawTabs();
    const asked = this.query.get("tab");
    this.open([...this.tabs.children].some((element) => element.dataset.tab === asked) ? asked : "messages");
    for (const key of this.pressed.splice(0)) this.key(key);
    clearInterval(this.timer);
    this.timer = setInterval(() => document.visibilityState === "visible" && this.refresh(), REFRESH_MS);
  }

  #missing(error) {
    const { app, address } = this;
    this.pressed = [];
    replace(this.badges);
    replace(this.actions);
    replace(this.tabs);
    const isMissing = error.status === 404;
    const tokenWanted = error.status === 401 || error.status === 403;
    replace(
      this.body,
      h(
        "div",
        { class: "empty", id: "missing" },
        h("h2", { text: isMissing ? "This stream does not exist" : error.status === 410 ? "This stream has been deleted" : "The stream cannot be opened" }),
        h("p", { class: "muted", text: explain(error) }),
        h("div", { class: "row" }, isMissing && button("Create it", () => openCreate(app, { bucket: address.bucket, name: address.name }), { kind: "primary", symbol: "plus" }), tokenWanted && button("Enter a token", () => app.openToken(), { kind: "primary", symbol: "lock" }), button("Retry", () => this.#load(), { symbol: "refresh" })),
      ),
    );
  }

  /** Update the properties of the stream without interrupting the reader. */
  async refresh() {
    try {
      this.info = Object.assign(this.info, await describe(this.app.client, this.address, { quiet: true }));
      if (!this.stopped) this.#drawHead();
    } catch (error) {
      if (!this.stopped && (error.status === 404 || error.status === 410)) replace(this.badges, streamBadges(this.info.type, { missing: true }));
    }
  }

  #drawBadges() {
    replace(this.badges, streamBadges(this.info.type, this.info, { long: true }));
  }

  #drawHead() {
    const { app, address, info } = this;
    this.#drawBadges();
    const readOnly = address.isInternal;
    replace(
      this.actions,
      button("Append", () => this.openAppend(), { symbol: "send", kind: "primary", id: "action-append", title: readOnly ? "Only the server writes to this stream" : "Append (a)", disabled: info.closed || readOnly }),
      button("Close", () => openClose(app, address, () => this.#closed()), { symbol: "lock", id: "action-close", disabled: info.closed || readOnly }),
      button("Fork", () => openFork(app, address), { symbol: "fork", id: "action-fork" }),
      button("Delete", () => openDelete(app, address, info, () => this.#deleted()), { symbol: "trash", kind: "danger-quiet", id: "action-delete", disabled: readOnly }),
      button("curl", () => app.copyCurl({ method: "HEAD", path: address.path }), { symbol: "terminal", kind: "quiet", title: "Copy a HEAD request as curl" }),
    );
  }

  #closed() {
    toast("Closed.");
    this.refresh();
    this.below.hidden = true;
  }

  #deleted() {
    toast("Deleted.");
    this.app.go(this.address.bucket === null ? "#/" : `#/bucket/${encodeURIComponent(this.address.bucket)}`);
  }

  #drawTabs() {
    const tabs = [["messages", "Messages"], this.info.json && ["state", "State"], this.address.bucket !== null && ["snapshots", "Snapshots"], ["about", "Headers"]].filter(Boolean);
    replace(this.tabs, tabs.map(([id, label]) => h("button", { class: "tab", type: "button", role: "tab", id: `tab-${id}`, "data-tab": id, text: label, onclick: () => this.open(id) })));
  }

  open(tab) {
    if (this.tab === tab) return;
    this.tab = tab;
    this.view?.stop?.();
    for (const element of this.tabs.children) element.setAttribute("aria-selected", String(element.dataset.tab === tab));
    const { app, address, info } = this;
    if (tab === "state") this.view = new StateView(app, address);
    else if (tab === "snapshots") this.view = new SnapshotsView(app, address, info, () => this.refresh());
    else if (tab === "about") this.view = { element: headersTable(app, address, info) };
    else this.view = new MessagesView(app, address, info, { from: this.query.get("from") || undefined, message: this.query.get("message"), onprogress: (reader) => this.#progress(reader), onagain: (again) => this.openAppend(again) });
    replace(this.body, this.view.element);
  }

  #progress(reader) {
    if (reader.state === "ended" && !this.info.closed) this.refresh();
    // The count above the list follows the messages that arrive.
    const total = this.view?.total ?? null;
    if (total === null || total === this.info.messages) return;
    this.info.messages = total;
    this.info.writtenAt = Date.now();
    this.info.tail = reader.upToDate ? reader.offset : this.info.tail;
    if (this.headFrame) return;
    // In the next frame, as the count of the list: the two agree.
    this.headFrame = requestAnimationFrame(() => {
      this.headFrame = null;
      if (!this.stopped) this.#drawBadges();
    });
  }

  /** Show the append form, with the content of a message if one is given. */
  openAppend(again = null) {
    if (!this.info || this.info.closed || this.address.isInternal) return;
    if (!this.box) {
      this.box = new AppendBox(this.app, this.address, this.info, () => this.refresh());
      replace(this.below, h("div", { class: "below-head" }, h("h2", { text: "Append" }), button("", () => (this.below.hidden = true), { symbol: "close", kind: "quiet", title: "Close" })), this.box.element);
    }
    this.below.hidden = false;
    if (again) this.box.fill(again);
    this.box.focus();
  }

  key(key) {
    if (!this.info && KEYS.includes(key)) return this.pressed.push(key) > 0;
    if (this.view?.key?.(key)) return true;
    if (key === "a") this.openAppend();
    else if (key === "Escape" && !this.below.hidden) this.below.hidden = true;
    else if (["1", "2", "3", "4"].includes(key)) this.tabs.children[Number(key) - 1]?.click();
    else return false;
    return true;
  }
}

function headersTable(app, address, info) {
  return h(
    "section",
    { class: "pad" },
    h("p", { class: "muted", text: "The response headers of a HEAD request to this stream." }),
    headerTable(info.headers),
    button("Copy as curl", () => app.copyCurl({ method: "HEAD", path: address.path }), { symbol: "terminal" }),
  );
}
