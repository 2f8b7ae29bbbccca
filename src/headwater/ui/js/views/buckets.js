// The list of buckets, and the streams of one. The protocol has no list of buckets: if the server does not offer one at
// `/ds`, the page shows the buckets that were opened or created here.

import { Address, explain, Refused } from "../client.js";
import { badge, button, field, form, h, icon, replace, toast } from "../dom.js";
import { ago, bytes, count, plural, shortType } from "../format.js";
import { parseOffset } from "../messages.js";
import { VirtualList } from "../virtual.js";
import { openConfirm, openCreate } from "./dialogs.js";

const POLL_MS = 3000;
const PAGE = 1000;
const ROW_PX = 40;
const ID = /^[a-z0-9_-]{4,64}$/;

export class BucketsView {
  constructor(app) {
    this.app = app;
    this.name = h("input", { class: "mono", id: "bucket-name", placeholder: "bucket id", autocomplete: "off", spellcheck: "false" });
    this.problem = h("p", { class: "problem", role: "alert", hidden: true });
    this.cards = h("div", { class: "cards", id: "buckets" });
    this.element = h(
      "article",
      { class: "page" },
      h("header", { class: "view-head" }, h("div", { class: "row" }, button("", () => app.go("#/"), { symbol: "back", kind: "quiet only-phone", title: "All streams" }), h("h1", { text: "Buckets" })), h("p", { class: "muted", text: "A bucket is a group of streams below /ds/. Create the bucket before its first stream." })),
      form({ class: "row wrap pad-x", onsubmit: () => this.#create() }, field("Bucket id", this.name, "4 to 64 characters: a–z, 0–9, _ and -"), button("Create", undefined, { kind: "primary", symbol: "plus", type: "submit", id: "bucket-create" }), button("Open", () => this.#openTyped(), { id: "bucket-open" }), button("curl", () => app.copyCurl({ method: "PUT", path: `/ds/${this.name.value.trim() || "BUCKET"}` }), { symbol: "terminal", kind: "quiet" })),
      h("div", { class: "pad-x" }, this.problem),
      this.cards,
    );
    this.#load();
    this.timer = setInterval(() => document.visibilityState === "visible" && this.#load(), POLL_MS);
  }

  stop() {
    clearInterval(this.timer);
  }

  #say(text) {
    this.problem.hidden = !text;
    this.problem.textContent = text || "";
  }

  async #create() {
    const id = this.name.value.trim();
    try {
      await this.app.client.expect({ method: "PUT", path: `/ds/${encodeURIComponent(id)}` });
      this.app.buckets.add(id);
      this.#say("");
      toast("Created.");
      this.app.go(`#/bucket/${encodeURIComponent(id)}`);
    } catch (error) {
      this.#say(explain(error));
    }
  }

  #openTyped() {
    const id = this.name.value.trim();
    if (!ID.test(id)) this.#say("A bucket id has 4 to 64 characters: a–z, 0–9, _ and -.");
    else this.app.go(`#/bucket/${id}`);
  }

  async #listed() {
    const found = [];
    for (let after = null; ; ) {
      const page = await this.app.client.json({ path: "/ds", query: { after }, quiet: true });
      found.push(...page.buckets);
      if (!page.has_more) return found;
      after = page.next_cursor;
    }
  }

  async #remembered() {
    const look = (id) => this.app.client.json({ path: `/ds/${encodeURIComponent(id)}`, quiet: true }).catch((error) => ({ bucket_id: id, error }));
    const found = await Promise.all(this.app.buckets.list().slice(0, 100).map(look));
    for (const bucket of found) if (bucket.error instanceof Refused && bucket.error.status === 404) this.app.buckets.remove(bucket.bucket_id);
    return found.filter((bucket) => !bucket.error);
  }

  async #load() {
    const there = await this.#listed().catch(() => this.#remembered());
    replace(
      this.cards,
      there.length === 0 && h("p", { class: "muted pad-x", text: "No buckets yet. Create one above; a bucket groups streams and adds snapshots to them." }),
      there.map((bucket) => h("a", { class: "card link", href: `#/bucket/${encodeURIComponent(bucket.bucket_id)}` }, h("h2", { class: "mono", text: bucket.bucket_id }), h("p", { class: "muted", text: plural(bucket.streams, "stream") }))),
    );
  }
}

export class BucketView {
  constructor(app, id) {
    this.app = app;
    this.id = id;
    this.streams = [];
    this.shown = [];
    this.summary = h("span", { class: "muted", id: "bucket-count" });
    this.filter = h("input", { type: "search", id: "bucket-filter", placeholder: "Filter by prefix", "aria-label": "Filter by prefix", oninput: () => this.#soon() });
    this.note = h("div", { class: "notice", hidden: true });
    this.list = new VirtualList({ rowHeight: ROW_PX, label: `Streams of ${id}`, id: "bucket-streams", render: (index) => this.#row(index), onopen: (index) => app.go(new Address(this.streams[index].stream_id, id).hash) });
    const path = `/ds/${encodeURIComponent(id)}`;
    this.element = h(
      "article",
      { class: "stream-view" },
      h(
        "header",
        { class: "view-head" },
        h("div", { class: "row" }, button("", () => app.go("#/buckets"), { symbol: "back", kind: "quiet", title: "All buckets" }), h("h1", { class: "ellipsis grow mono", text: id })),
        h("div", { class: "row wrap actions" }, button("New stream", () => openCreate(app, { bucket: id }), { symbol: "plus", kind: "primary", id: "bucket-new-stream" }), button("Delete bucket", () => openConfirm(app, `Delete bucket ${id}?`, "Only an empty bucket can be deleted.", { request: () => ({ method: "DELETE", path }), action: "Delete bucket", done: () => this.#deleted() }), { symbol: "trash", kind: "danger-quiet", id: "bucket-delete" }), button("curl", () => app.copyCurl({ path: `${path}/streams`, query: { prefix: this.filter.value || null, limit: "1000" } }), { symbol: "terminal", kind: "quiet", title: "Copy the listing as curl" })),
      ),
      h("div", { class: "toolbar" }, h("div", { class: "search grow" }, icon("search"), this.filter), this.summary),
      this.note,
      this.list.element,
    );
    app.buckets.add(id);
    this.#load();
    this.timer = setInterval(() => document.visibilityState === "visible" && this.#load(), POLL_MS);
  }

  stop() {
    this.stopped = true;
    clearInterval(this.timer);
    clearTimeout(this.typing);
  }

  #deleted() {
    this.app.buckets.remove(this.id);
    toast("Deleted.");
    this.app.go("#/buckets");
  }

  #soon() {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.#load(), 150);
  }

  /** Load all pages of the listing; a newer load cancels this one. */
  async #load() {
    const turn = (this.turn = (this.turn || 0) + 1);
    const prefix = this.filter.value.trim();
    const found = [];
    try {
      let after = null;
      for (;;) {
        const page = await this.app.client.json({ path: `/ds/${encodeURIComponent(this.id)}/streams`, query: { prefix: prefix || null, after, limit: String(PAGE) }, quiet: true });
        if (turn !== this.turn || this.stopped) return;
        for (const stream of page.streams) found.push(stream);
        if (!page.has_more) break;
        after = page.next_cursor;
        if (found.length > this.streams.length) this.#show(found, true);
      }
      this.note.hidden = true;
      this.#show(found, false);
    } catch (error) {
      if (turn !== this.turn || this.stopped) return;
      this.note.hidden = false;
      replace(this.note, h("p", { text: explain(error) }), error.status === 404 && button("Create this bucket", () => this.#make(), { kind: "primary" }));
    }
  }

  async #make() {
    try {
      await this.app.client.expect({ method: "PUT", path: `/ds/${encodeURIComponent(this.id)}` });
      await this.#load();
    } catch (error) {
      toast(explain(error), "bad");
    }
  }

  #show(streams, more) {
    this.streams = streams;
    this.summary.textContent = more ? `${count(streams.length)}+ streams` : plural(streams.length, "stream");
    this.list.setCount(streams.length);
    this.list.refresh();
  }

  #row(index) {
    const stream = this.streams[index];
    const isOpen = String(stream.status).toLowerCase() === "open";
    const size = typeof stream.tail_offset === "number" ? stream.tail_offset : (parseOffset(stream.tail_offset)?.position ?? null);
    return h(
      "div",
      { class: "row-item wide-row" },
      h("span", { class: "name ellipsis grow", text: stream.stream_id }),
      h("span", { class: "badges" }, badge(shortType(stream.content_type), "type", stream.content_type), badge(isOpen ? "open" : "closed", isOpen ? "good" : "closed"), size !== null && badge(bytes(size), "plain"), badge(ago(stream.last_write_at_ms), "plain", "last write")),
    );
  }
}
