// Snapshots of a stream, and /bootstrap: the snapshot and all messages after it, in one response.

import { explain, refusal } from "../client.js";
import { badge, button, field, form, h, replace, toast } from "../dom.js";
import { bytes, hexLines, isText, oneLine, plural } from "../format.js";
import { parse, pretty } from "../json.js";
import { boundaryOf, parts } from "../multipart.js";
import { answerPanel } from "./answer.js";
import { openConfirm } from "./dialogs.js";

const PARTS_SHOWN = 200;
const SHOWN_MAX = 100_000;

export class SnapshotsView {
  constructor(app, address, info, onchange) {
    this.app = app;
    this.address = address;
    this.info = info;
    this.onchange = onchange;
    this.latest = h("div", { class: "stack", id: "snapshot-latest" });
    this.result = h("div", { class: "stack", id: "snapshot-result" });
    this.offset = h("input", { class: "mono", id: "snapshot-offset", value: info.tail ?? "", spellcheck: "false" });
    this.type = h("input", { id: "snapshot-type", value: "application/json" });
    this.body = h("textarea", { class: "mono", id: "snapshot-body", rows: "5", spellcheck: "false", placeholder: '{"state": "after all messages before the offset"}' });
    this.element = h(
      "section",
      { class: "pad stack scroll" },
      h("section", { class: "card" }, h("h2", { text: "Latest snapshot" }), this.latest),
      h(
        "section",
        { class: "card" },
        h("h2", { text: "Bootstrap" }),
        h("p", { class: "muted", text: "Returns the latest snapshot and all messages after it in one response. Continue reading at its Stream-Next-Offset." }),
        h("div", { class: "row" }, button("Bootstrap", () => this.#bootstrap(), { kind: "primary", id: "bootstrap" }), button("curl", () => app.copyCurl({ path: `${address.path}/bootstrap` }), { symbol: "terminal", kind: "quiet" })),
      ),
      h(
        "section",
        { class: "card" },
        h("h2", { text: "Publish a snapshot" }),
        h("p", { class: "muted", text: "A snapshot replaces all messages before its offset. They are no longer stored, and reads before the offset return 410." }),
        form({ class: "stack", onsubmit: () => this.#publish() }, h("div", { class: "fields" }, field("Offset", this.offset), field("Content type", this.type)), field("Snapshot", this.body), h("div", { class: "row" }, button("Publish", undefined, { kind: "primary", type: "submit", id: "snapshot-publish" }), button("curl", () => app.copyCurl(this.#request()), { symbol: "terminal", kind: "quiet" }))),
      ),
      this.result,
    );
    this.#load();
  }

  #request() {
    const path = `${this.address.path}/snapshot/${encodeURIComponent(this.offset.value.trim())}`;
    return { method: "PUT", path, headers: { "Content-Type": this.type.value.trim() || "application/octet-stream" }, body: this.body.value };
  }

  async #load() {
    const { app, address } = this;
    const path = `${address.path}/snapshot`;
    try {
      const response = await app.client.send({ path });
      if (response.status === 404) {
        const answer = await refusal(response);
        replace(this.latest, h("p", { class: "muted", text: `None. ${answer.message}` }));
        return;
      }
      if (!response.ok) throw await refusal(response);
      const data = new Uint8Array(await response.arrayBuffer());
      const offset = response.headers.get("stream-snapshot-offset") ?? "";
      const type = response.headers.get("content-type") ?? "";
      replace(
        this.latest,
        h("div", { class: "badges" }, badge(type, "type"), badge(bytes(data.length), "plain"), badge(`at ${offset}`, "life")),
        contentView(data, type),
        h(
          "div",
          { class: "row" },
          button("curl", () => app.copyCurl({ path }), { symbol: "terminal", kind: "quiet small" }),
          button("Delete", () => openConfirm(app, "Delete the snapshot?", "The latest snapshot cannot be deleted, because /bootstrap needs it.", { request: () => ({ method: "DELETE", path: `${path}/${encodeURIComponent(offset)}` }), action: "Delete snapshot", done: () => this.#load() }), { symbol: "trash", kind: "danger-quiet small", id: "snapshot-delete" }),
        ),
      );
    } catch (error) {
      replace(this.latest, h("p", { class: "problem", text: explain(error) }));
    }
  }

  async #publish() {
    try {
      const response = await this.app.client.send(this.#request());
      const body = await response.text();
      replace(this.result, answerPanel(this.app, response.entry, { body, meaning: response.ok ? "Published." : null }));
      if (!response.ok) return;
      toast("Published.");
      this.onchange();
      await this.#load();
    } catch (error) {
      replace(this.result, h("p", { class: "problem", text: explain(error) }));
    }
  }

  async #bootstrap() {
    try {
      const response = await this.app.client.send({ path: `${this.address.path}/bootstrap` });
      if (!response.ok) {
        replace(this.result, answerPanel(this.app, response.entry, { body: await response.text() }));
        return;
      }
      const data = new Uint8Array(await response.arrayBuffer());
      const found = parts(data, boundaryOf(response.headers.get("content-type")));
      const [snapshot, ...updates] = found;
      replace(
        this.result,
        answerPanel(this.app, response.entry, { meaning: `${response.headers.get("stream-snapshot-offset") === "-1" ? "No snapshot" : "A snapshot"} and ${plural(updates.length, "message")}.` }),
        h("div", { class: "parts", id: "bootstrap-parts" }, [snapshot && partView(snapshot, "snapshot"), updates.slice(0, PARTS_SHOWN).map((part, at) => partView(part, `message ${at}`)), updates.length > PARTS_SHOWN && h("p", { class: "muted", text: `… ${updates.length - PARTS_SHOWN} more` })]),
      );
    } catch (error) {
      replace(this.result, h("p", { class: "problem", text: explain(error) }));
    }
  }
}

function partView(part, name) {
  const preview = isText(part.type) ? oneLine(new TextDecoder().decode(part.data.subarray(0, 400)), 160) : bytes(part.data.length);
  const details = h("details", { class: "part" }, h("summary", {}, badge(name, name === "snapshot" ? "life" : "plain"), h("span", { class: "muted", text: part.type }), h("span", { class: "mono ellipsis grow", text: preview })));
  details.addEventListener("toggle", () => details.open && details.childElementCount === 1 && details.append(contentView(part.data, part.type)));
  return details;
}

function contentView(data, type) {
  if (data.length === 0) return h("p", { class: "muted", text: "Empty." });
  if (!isText(type)) return h("pre", { class: "mono block", text: hexLines(data, 4096).join("\n") });
  const text = new TextDecoder().decode(data.subarray(0, SHOWN_MAX));
  try {
    return h("pre", { class: "mono block", text: pretty(parse(text)) });
  } catch {
    return h("pre", { class: "mono block", text });
  }
}
