// Subscriptions: the acknowledged offset of each stream, the lag, and the requests of a worker to try out.

import { Address, explain, Refused } from "../client.js";
import { badge, button, field, form, h, replace, select, toast } from "../dom.js";
import { count, plural, span } from "../format.js";
import { parseOffset, shortOffset } from "../messages.js";
import { describe } from "../reader.js";
import { answerPanel } from "./answer.js";
import { openConfirm, requestDialog } from "./dialogs.js";

const ROOT = "/v1/stream/__ds/subscriptions";
const POLL_MS = 2000;
const LAGS_MAX = 50; // streams whose tail is requested on each update

/** The address of a linked stream; `/ds/{bucket}/{stream}` is in a bucket. */
function addressOf(path) {
  const found = path.match(/^\/ds\/([^/]+)\/(.+)$/);
  return found ? new Address(found[2], found[1]) : new Address(path);
}

const subscriptionPath = (id) => `${ROOT}/${encodeURIComponent(id)}`;

export class SubscriptionsView {
  constructor(app) {
    this.app = app;
    this.id = h("input", { class: "mono", id: "subscription-id", placeholder: "subscription id", autocomplete: "off", spellcheck: "false" });
    this.cards = h("div", { class: "cards", id: "subscriptions" });
    this.element = h(
      "article",
      { class: "page" },
      h("header", { class: "view-head" }, h("div", { class: "row" }, button("", () => app.go("#/"), { symbol: "back", kind: "quiet only-phone", title: "All streams" }), h("h1", { text: "Subscriptions" })), h("p", { class: "muted", text: "A subscription follows streams and wakes a worker when there is new data: with a webhook, or with an event in a wake stream." })),
      form({ class: "row wrap pad-x", onsubmit: () => this.#open() }, field("Subscription id", this.id), button("Open", undefined, { type: "submit", id: "subscription-open" }), button("New subscription", () => openSubscribe(app, this.id.value.trim()), { kind: "primary", symbol: "plus", id: "subscription-new" })),
      this.cards,
    );
    this.#load();
    this.timer = setInterval(() => document.visibilityState === "visible" && this.#load(), POLL_MS * 2);
  }

  stop() {
    clearInterval(this.timer);
  }

  #open() {
    if (this.id.value.trim()) this.app.go(`#/subscription/${encodeURIComponent(this.id.value.trim())}`);
  }

  async #listed() {
    const found = [];
    for (let after = null; ; ) {
      const page = await this.app.client.json({ path: ROOT, query: { after }, quiet: true });
      found.push(...page.subscriptions);
      if (!page.has_more) return found;
      after = page.next_cursor;
    }
  }

  /** For servers without a list of subscriptions: those that were opened or created here. */
  async #remembered() {
    const look = (id) => this.app.client.json({ path: subscriptionPath(id), quiet: true }).catch((error) => ({ id, error }));
    const found = await Promise.all(this.app.subscriptions.list().slice(0, 100).map(look));
    for (const one of found) if (one.error instanceof Refused && one.error.status === 404) this.app.subscriptions.remove(one.id);
    return found.filter((one) => !one.error);
  }

  async #load() {
    const there = await this.#listed().catch(() => this.#remembered());
    replace(
      this.cards,
      there.length === 0 && h("div", { class: "empty", id: "no-subscriptions" }, h("p", { text: "No subscriptions yet." }), h("p", { class: "muted" }, "Create one to wake a worker when streams get new messages, here or with ", h("code", { text: "headwater subscription create" }), ".")),
      there.map((one) => h("a", { class: "card link", href: `#/subscription/${encodeURIComponent(one.id)}` }, h("h2", { class: "mono ellipsis", text: one.id }), h("div", { class: "badges" }, badge(one.type, "type"), badge(one.status ?? "active", one.status === "failed" ? "bad" : "good"), badge(plural(one.stream_count ?? one.streams?.length ?? 0, "stream"), "plain")), h("p", { class: "muted ellipsis", text: one.description || one.pattern || "" }), one.failure && h("p", { class: "problem", text: failureText(one.failure) }))),
    );
  }
}

export function openSubscribe(app, id = "") {
  const idInput = h("input", { class: "mono", id: "sub-id", value: id, autocomplete: "off", spellcheck: "false" });
  const type = select([["pull-wake", "pull-wake: workers watch a stream and claim work"], ["webhook", "webhook: the server calls a URL"]], "pull-wake", { id: "sub-type" });
  const pattern = h("input", { class: "mono", id: "sub-pattern", placeholder: "orders/**", spellcheck: "false" });
  const streams = h("input", { class: "mono", id: "sub-streams", placeholder: "a, b/c", spellcheck: "false" });
  const wake = h("input", { class: "mono", id: "sub-wake", placeholder: "wake/pool", spellcheck: "false" });
  const url = h("input", { class: "mono", id: "sub-url", placeholder: "https://example.com/hook", spellcheck: "false" });
  const lease = h("input", { id: "sub-lease", inputmode: "numeric", placeholder: "30000" });
  const description = h("input", { id: "sub-description" });
  const wakeField = field("Wake stream", wake, "Wake events are appended to this stream.");
  const urlField = field("Webhook URL", url, "https, or http on localhost.");
  const shown = () => {
    wakeField.hidden = type.value !== "pull-wake";
    urlField.hidden = type.value !== "webhook";
  };
  type.addEventListener("change", shown);
  shown();
  const request = () => {
    if (!idInput.value.trim()) throw new Error("Enter an id for the subscription.");
    const body = { type: type.value };
    if (pattern.value.trim()) body.pattern = pattern.value.trim();
    const names = streams.value.split(",").map((name) => name.trim()).filter(Boolean);
    if (names.length) body.streams = names;
    if (type.value === "webhook") body.webhook = { url: url.value.trim() };
    else body.wake_stream = wake.value.trim();
    if (lease.value.trim()) body.lease_ttl_ms = Number(lease.value.trim());
    if (description.value.trim()) body.description = description.value.trim();
    return { method: "PUT", path: subscriptionPath(idInput.value.trim()), headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  };
  requestDialog(app, "New subscription", [field("Id", idInput), field("Type", type), h("div", { class: "fields" }, field("Pattern", pattern, "* matches one segment, ** any number."), field("Streams", streams)), wakeField, urlField, h("div", { class: "fields" }, field("Lease in ms", lease), field("Description", description))], {
    request,
    action: "Subscribe",
    done(response) {
      toast(response.status === 201 ? "Subscribed." : "A subscription with this configuration already exists.");
      app.subscriptions.add(idInput.value.trim());
      app.go(`#/subscription/${encodeURIComponent(idInput.value.trim())}`);
    },
  });
  idInput.focus();
}

export class SubscriptionView {
  constructor(app, id) {
    this.app = app;
    this.id = id;
    this.path = subscriptionPath(id);
    this.lease = null;
    this.facts = h("div", { class: "badges" });
    this.rows = h("tbody", { id: "cursors" });
    this.note = h("div", { class: "notice", hidden: true });
    this.failure = h("div", { class: "notice bad", hidden: true, id: "subscription-failure" });
    this.link = h("input", { class: "mono", id: "link-name", placeholder: "stream name", "aria-label": "Stream to link", spellcheck: "false" });
    this.worker = h("input", { id: "worker", value: "browser", "aria-label": "Worker" });
    this.work = h("section", { class: "card", hidden: true }, h("h2", { text: "Act as a worker" }));
    this.answer = h("div", { id: "worker-answer" });
    this.element = h(
      "article",
      { class: "page" },
      h(
        "header",
        { class: "view-head" },
        h("div", { class: "row" }, button("", () => app.go("#/subscriptions"), { symbol: "back", kind: "quiet", title: "All subscriptions" }), h("h1", { class: "ellipsis grow mono", text: id })),
        this.facts,
        h("div", { class: "row wrap actions" }, button("Delete", () => openConfirm(app, `Delete subscription ${id}?`, "Its acknowledged offsets are lost.", { request: () => ({ method: "DELETE", path: this.path }), action: "Delete subscription", done: () => this.#deleted() }), { symbol: "trash", kind: "danger-quiet", id: "subscription-delete" }), button("curl", () => app.copyCurl({ path: this.path }), { symbol: "terminal", kind: "quiet" })),
      ),
      this.note,
      this.failure,
      h(
        "section",
        { class: "card" },
        h("h2", { text: "Streams" }),
        h("div", { class: "table-scroll" }, h("table", { class: "data" }, h("thead", {}, h("tr", {}, ["stream", "link", "acknowledged", "tail", "lag", ""].map((text) => h("th", { scope: "col", class: text === "link" && "link-type", text })))), this.rows)),
        form({ class: "row wrap", onsubmit: () => this.#addLink() }, this.link, button("Link stream", undefined, { type: "submit", symbol: "link", id: "link-add" }), button("curl", () => app.copyCurl(this.#linkRequest()), { symbol: "terminal", kind: "quiet small" })),
      ),
      this.work,
    );
    app.subscriptions.add(id);
    this.#load();
    this.timer = setInterval(() => document.visibilityState === "visible" && this.#load(), POLL_MS);
  }

  stop() {
    this.stopped = true;
    clearInterval(this.timer);
  }

  #deleted() {
    this.app.subscriptions.remove(this.id);
    toast("Deleted.");
    this.app.go("#/subscriptions");
  }

  async #load() {
    try {
      const body = await this.app.client.json({ path: this.path, quiet: true });
      const links = body.streams ?? [];
      const tails = await Promise.all(links.slice(0, LAGS_MAX).map((link) => describe(this.app.client, addressOf(link.path), { quiet: true }).catch(() => null)));
      if (this.stopped) return;
      this.note.hidden = true;
      this.#draw(body, links, tails);
    } catch (error) {
      if (this.stopped) return;
      this.note.hidden = false;
      replace(this.note, h("p", { text: explain(error) }), error.status === 404 && button("Create it", () => openSubscribe(this.app, this.id), { kind: "primary" }));
    }
  }

  #draw(body, links, tails) {
    replace(this.facts, badge(body.type, "type"), badge(body.status ?? "active", body.status === "failed" ? "bad" : "good"), body.pattern && badge(`pattern ${body.pattern}`, "plain"), body.wake_stream && badge(`wakes ${body.wake_stream}`, "plain"), body.webhook && badge(`calls ${body.webhook.url}`, "plain"), badge(`lease ${span(body.lease_ttl_ms)}`, "plain"), body.description && badge(body.description, "plain"));
    replace(
      this.rows,
      links.length === 0 && h("tr", {}, h("td", { colspan: "6", class: "muted", text: "No streams are linked yet." })),
      links.map((link, at) => {
        const tail = tails[at]?.tail ?? null;
        return h(
          "tr",
          { "data-stream": link.path },
          h("td", {}, h("a", { class: "mono", href: addressOf(link.path).hash, text: link.path })),
          h("td", { class: "link-type", text: link.link_type }),
          h("td", { class: "mono muted", text: shortOffset(link.acked_offset), title: link.acked_offset }),
          h("td", { class: "mono muted", text: tail === null ? "–" : shortOffset(tail), title: tail ?? "" }),
          h("td", {}, lagBadge(link.acked_offset, tail)),
          h("td", {}, link.link_type === "explicit" && button("", () => this.#unlink(link.path), { symbol: "close", kind: "quiet small", title: `Unlink ${link.path}` })),
        );
      }),
      body.has_more && h("tr", {}, h("td", { colspan: "6", class: "muted", text: `The first ${count(links.length)} of ${plural(body.stream_count, "stream")}.` })),
    );
    this.failure.hidden = !body.failure;
    if (body.failure) replace(this.failure, h("p", { text: failureText(body.failure) }));
    this.links = links;
    this.tails = tails;
    if (body.type === "pull-wake" && this.work.hidden) this.#drawWork();
  }

  #drawWork() {
    this.work.hidden = false;
    this.work.append(
      h("p", { class: "muted", text: "Claim the work, acknowledge what you have read, release the rest. A second worker gets 409, and a worker with an expired lease is fenced." }),
      h("div", { class: "row wrap" }, field("Worker", this.worker), button("Claim", () => this.#claim(), { kind: "primary", id: "claim" }), button("Acknowledge all", () => this.#ack(), { id: "ack" }), button("Release", () => this.#release(), { id: "release" })),
      this.answer,
    );
  }

  async #move(request, meaning) {
    try {
      const response = await this.app.client.send(request);
      const text = await response.text();
      replace(this.answer, answerPanel(this.app, response.entry, { body: text, meaning: response.ok ? meaning : null }));
      this.#load();
      return response.ok ? text : null;
    } catch (error) {
      replace(this.answer, h("p", { class: "problem", text: explain(error) }));
      return null;
    }
  }

  async #claim() {
    const headers = { "Content-Type": "application/json" };
    const text = await this.#move({ method: "POST", path: `${this.path}/claim`, headers, body: JSON.stringify({ worker: this.worker.value }) }, "You hold the lease until it expires.");
    if (text) this.lease = JSON.parse(text);
  }

  #leased(what, body) {
    if (!this.lease) {
      toast("Claim the work first.", "bad");
      return null;
    }
    const { wake_id, generation, token } = this.lease;
    return { method: "POST", path: `${this.path}/${what}`, headers: { "Content-Type": "application/json" }, bearer: token, body: JSON.stringify({ wake_id, generation, ...body }) };
  }

  async #ack() {
    const acks = (this.lease?.streams ?? []).map((stream) => ({ stream: stream.path, offset: stream.tail_offset }));
    const request = this.#leased("ack", { acks, done: true });
    if (request) await this.#move(request, "All claimed messages are acknowledged.");
  }

  async #release() {
    const request = this.#leased("release", {});
    if (request) await this.#move(request, "Released; another worker can claim the work.");
  }

  #linkRequest() {
    return { method: "POST", path: `${this.path}/streams`, headers: { "Content-Type": "application/json" }, body: JSON.stringify({ streams: [this.link.value.trim()] }) };
  }

  async #addLink() {
    try {
      await this.app.client.expect(this.#linkRequest());
      this.link.value = "";
      await this.#load();
    } catch (error) {
      toast(explain(error), "bad");
    }
  }

  async #unlink(name) {
    try {
      await this.app.client.expect({ method: "DELETE", path: `${this.path}/streams/${encodeURIComponent(name)}` });
      await this.#load();
    } catch (error) {
      toast(explain(error), "bad");
    }
  }
}

/** Why the worker is not woken, and when that is tried again. */
function failureText({ attempts, reason, retry_at: retryAt }) {
  const tried = attempts > 0 ? `${plural(attempts, "failed attempt")}. ` : "";
  const ms = retryAt ? Date.parse(retryAt) - Date.now() : null;
  const next = ms === null ? "" : ms > 0 ? ` Next attempt in ${span(ms)}.` : " The next attempt is due.";
  return `${tried}${reason ? `Last reason: ${reason}${reason.endsWith(".") ? "" : "."}` : "The reason is not known any more."}${next}`;
}

/** The lag of a stream: in messages if the offsets contain the count, otherwise only whether there is one. */
function lagBadge(acked, tail) {
  if (tail === null) return badge("deleted", "plain");
  const from = parseOffset(acked);
  const to = parseOffset(tail);
  if (from && to) {
    const behind = to.index - from.index;
    return badge(behind === 0 ? "up to date" : `${count(behind)} behind`, behind === 0 ? "good" : "warn");
  }
  return acked === tail ? badge("up to date", "good") : badge("behind", "warn");
}
