// The State tab: state or session events folded live into tables, one for each type, one row for each key.

import { explain } from "../client.js";
import { badge, button, h, icon, replace } from "../dom.js";
import { Fold } from "../fold.js";
import { ago, count, oneLine, plural } from "../format.js";
import { Members, parse, print } from "../json.js";
import { StreamReader } from "../reader.js";
import { VirtualList } from "../virtual.js";
import { tree } from "./tree.js";

const ROW_PX = 26;
const COLUMNS_MAX = 6;
const SAMPLED = 200;

export class StateView {
  constructor(app, address) {
    this.app = app;
    this.address = address;
    this.fold = new Fold();
    this.type = null;
    this.keys = [];
    this.columns = [];
    this.types = h("div", { class: "row wrap", role: "tablist", id: "state-types" });
    this.status = h("div", { class: "reader-status", id: "state-status" });
    this.search = h("input", { type: "search", id: "state-search", placeholder: "Filter by key or value", "aria-label": "Filter", oninput: () => this.#soon() });
    this.head = h("div", { class: "columns state-row", "aria-hidden": "true" });
    this.list = new VirtualList({ rowHeight: ROW_PX, label: "Entities", id: "entities", render: (index) => this.#row(index), onopen: (index) => this.#show(this.keys[index]) });
    this.detail = h("aside", { class: "detail", hidden: true, "aria-label": "Entity", id: "entity" });
    this.note = h("div", { class: "notice", hidden: true });
    const curl = () => app.copyCurl({ path: address.path, query: { offset: "-1", live: "sse" }, live: true });
    this.element = h(
      "section",
      { class: "messages-view" },
      h("div", { class: "toolbar" }, this.types, h("div", { class: "search grow" }, icon("search"), this.search), button("", curl, { symbol: "terminal", kind: "quiet", title: "Copy the request for this stream as curl" })),
      h("div", { class: "status-row" }, this.status),
      this.note,
      h("div", { class: "split" }, h("div", { class: "list-pane" }, this.head, this.list.element), this.detail),
    );
    this.reader = new StreamReader(app.client, address, {
      onmessages: (messages) => this.#received(messages),
      onstate: () => this.#soon(),
    }).start();
    this.#draw();
  }

  stop() {
    this.reader.stop();
    clearTimeout(this.timer);
  }

  #received(messages) {
    for (const message of messages) {
      try {
        this.fold.apply(parse(message.text), message);
      } catch {
        this.fold.others += 1;
      }
    }
    this.#soon();
  }

  #soon() {
    if (this.timer) return;
    this.timer = setTimeout(() => {
      this.timer = null;
      this.#draw();
    }, 100);
  }

  #draw() {
    const { fold, reader } = this;
    const types = [...fold.tables.keys()].sort();
    if (this.type === null || !fold.tables.has(this.type)) this.type = types[0] ?? null;
    replace(this.types, types.map((type) => h("button", { class: "tab", type: "button", role: "tab", "aria-selected": String(type === this.type), "data-type": type, onclick: () => this.#choose(type) }, type, " ", h("span", { class: "muted", text: count(fold.tables.get(type).size) }))));
    const live = reader.state === "live";
    this.status.dataset.state = reader.state;
    this.status.dataset.events = fold.events;
    replace(this.status, badge(reader.state, live ? "good" : reader.state === "failed" ? "bad" : "plain"), h("span", { text: `${plural(fold.events, "state event")}` }), fold.others > 0 && h("span", { class: "muted", text: `${plural(fold.others, "message")} ${fold.others === 1 ? "is not a state event" : "are not state events"}` }));
    this.note.hidden = !(reader.state === "failed" || (fold.events === 0 && (live || reader.state === "ended")));
    if (!this.note.hidden) {
      const text =
        reader.state === "failed"
          ? `${explain(reader.error)}${reader.error.status === 410 ? " The Snapshots tab has the state up to the snapshot." : ""}`
          : 'This stream has no state events. A state event is a JSON object with "type", "key", and an "operation" (set, insert, update, append, delete, remove).';
      replace(this.note, h("p", { text }));
    }
    this.#drawTable();
  }

  #choose(type) {
    this.type = type;
    this.#draw();
  }

  #drawTable() {
    const table = this.fold.tables.get(this.type) ?? new Map();
    const wanted = this.search.value.trim().toLowerCase();
    this.keys = [...table.keys()];
    if (wanted) this.keys = this.keys.filter((key) => key.toLowerCase().includes(wanted) || print(table.get(key).value).toLowerCase().includes(wanted));
    this.columns = commonFields(table);
    const template = `minmax(120px, 1.2fr) ${"minmax(80px, 1fr) ".repeat(this.columns.length || 1)}70px 90px`;
    this.template = template;
    const names = this.columns.length ? this.columns : ["value"];
    replace(this.head, h("span", { text: "key" }), names.map((name) => h("span", { class: "ellipsis", text: name })), h("span", { text: "changes" }), h("span", { text: "updated" }));
    this.head.style.gridTemplateColumns = template;
    this.list.setCount(this.keys.length);
    this.list.refresh();
    if (this.shown !== undefined && !this.detail.hidden) this.#show(this.shown);
  }

  #row(index) {
    const key = this.keys[index];
    const entity = this.fold.tables.get(this.type).get(key);
    const cells = this.columns.length ? this.columns.map((name) => (entity.value instanceof Members ? entity.value.get(name) : undefined)) : [entity.value];
    const row = h(
      "div",
      { class: "state-row", "data-key": key },
      h("span", { class: "mono ellipsis", text: oneLine(key, 120) }),
      cells.map((value) => h("span", { class: "mono ellipsis", text: cellText(value) })),
      h("span", { class: "muted", text: count(entity.changes) }),
      h("span", { class: "muted ellipsis", text: entity.at ? ago(entity.at) : "" }),
    );
    row.style.gridTemplateColumns = this.template;
    return row;
  }

  #show(key) {
    const entity = this.fold.tables.get(this.type)?.get(key);
    this.shown = key;
    this.detail.hidden = false;
    const close = () => {
      this.detail.hidden = true;
    };
    replace(
      this.detail,
      h("header", {}, h("h3", { class: "ellipsis", text: key }), button("", close, { symbol: "close", kind: "quiet", title: "Close" })),
      h("div", { class: "detail-body mono" }, entity ? tree(entity.value) : h("p", { class: "muted", text: "This entity has been removed." })),
      entity?.offset && h("p", { class: "muted mono", text: `last event ends at ${entity.offset}` }),
    );
  }

  key(key) {
    if (key !== "Escape" || this.detail.hidden) return false;
    this.detail.hidden = true;
    return true;
  }
}

/** The fields that most values of a table have, the most common first. */
function commonFields(table) {
  const seen = new Map();
  let sampled = 0;
  for (const { value } of table.values()) {
    if (value instanceof Members) for (const [key] of value.entries) seen.set(key, (seen.get(key) || 0) + 1);
    sampled += 1;
    if (sampled >= SAMPLED) break;
  }
  return [...seen].sort((a, b) => b[1] - a[1]).slice(0, COLUMNS_MAX).map(([name]) => name);
}

function cellText(value) {
  if (value === undefined) return "";
  return oneLine(typeof value === "string" ? value : print(value), 160);
}
