// One message in full: as a JSON tree, as text or as hex, with its actions.

import { button, copy, h, replace, saveFile } from "../dom.js";
import { bytes, hexLines } from "../format.js";
import { parse, pretty } from "../json.js";
import { marked } from "./message_row.js";
import { tree } from "./tree.js";

const TEXT_MAX = 1_000_000;
const WIDE_HEX_PX = 640; // below this, a line of sixteen bytes would hide their characters

export class Detail {
  constructor(app, address, onclose, onagain) {
    this.app = app;
    this.address = address;
    this.onclose = onclose;
    this.onagain = onagain;
    this.message = null;
    this.element = h("aside", { class: "detail", hidden: true, "aria-label": "Message", id: "detail" });
  }

  show(message, mode, readFrom, words = []) {
    this.words = words;
    this.message = message;
    this.mode = mode;
    this.readFrom = readFrom;
    this.element.hidden = false;
    this.#draw();
  }

  setMode(mode) {
    this.mode = mode;
    if (this.message) this.#draw();
  }

  close() {
    if (!this.message) return;
    this.message = null;
    this.element.hidden = true;
    replace(this.element);
    this.onclose();
  }

  #draw() {
    const { message } = this;
    const tabs = ["json", "text", "hex"].map((mode) => button(mode === "json" ? "JSON" : mode, () => this.setMode(mode), { kind: `tab${mode === this.mode ? " current" : ""}` }));
    const title = message.index === null ? `Message ${message.number}` : `Message ${message.index}`;
    const facts = [
      ["offset", message.start],
      ["next offset", message.end],
      ["size", bytes(message.size)],
      ["received", message.live || message.time ? new Date(message.live ? message.at : message.time).toISOString() : "before this page was opened"],
    ].filter(([, value]) => value);
    const rows = facts.map(([name, value]) => h("tr", {}, h("th", { scope: "row", text: name }), h("td", { class: "mono", text: value })));
    replace(
      this.element,
      h("header", {}, h("h3", { text: title }), h("div", { class: "row" }, tabs), button("", () => this.close(), { symbol: "close", kind: "quiet", title: "Close (Esc)" })),
      h("div", { class: "detail-body", id: "detail-body" }, this.#content()),
      h("table", { class: "headers" }, h("tbody", {}, rows)),
      h("div", { class: "row wrap" }, this.#actions(message)),
    );
  }

  #actions(message) {
    const { app, address } = this;
    const actions = [button("Copy", () => copy(message.string(), "Message copied"), { symbol: "copy", kind: "small" })];
    actions.push(button("Save", () => saveFile(fileName(address, message), [message.bytes()]), { symbol: "save", kind: "small", title: "Save the bytes of this message as a file" }));
    if (message.start && message.end) {
      actions.push(button("curl", () => app.copyCurl({ path: address.path, query: { offset: message.start, until: message.end } }), { symbol: "terminal", kind: "small", title: "Copy a read of this message as curl" }));
    } else if (message.end) {
      actions.push(button("curl", () => app.copyCurl({ path: address.path, query: { offset: message.end } }), { symbol: "terminal", kind: "small", title: "Copy a read that starts after this message as curl" }));
    }
    if (message.start) actions.push(button("Link", () => copy(`${location.href.split("#")[0]}${address.hash}?message=${encodeURIComponent(message.start)}`, "Link copied"), { symbol: "link", kind: "small", title: "Copy a link to this message" }));
    if (message.end) {
      actions.push(button("Read from here", () => this.readFrom(message.end), { kind: "small" }));
      if (!address.isInternal) actions.push(button("Append again", () => this.onagain(message), { symbol: "send", kind: "small", title: "Copy this message into the append form" }));
      actions.push(button("Fork here", () => app.openFork(address, message.end), { symbol: "fork", kind: "small" }));
    }
    return actions;
  }

  #content() {
    const { message, mode } = this;
    if (mode === "hex") return h("pre", { class: "mono", text: hexLines(message.bytes(), this.element.clientWidth < WIDE_HEX_PX ? 8 : 16).join("\n") });
    const text = message.string();
    if (mode === "json") {
      try {
        return h("div", { class: "mono" }, tree(parse(text)));
      } catch (error) {
        return [h("p", { class: "muted", text: `Cannot be shown as a tree: ${error.message}.` }), plainText(text, this.words)];
      }
    }
    try {
      return plainText(pretty(parse(text)), this.words);
    } catch {
      return plainText(text, this.words);
    }
  }
}

function fileName(address, message) {
  return `${address.name.split("/").at(-1)}-${message.index ?? message.number}${message.text === null ? ".bin" : ".txt"}`;
}

function plainText(text, words) {
  const cut = text.length > TEXT_MAX ? `${text.slice(0, TEXT_MAX)}…` : text;
  return marked(h("pre", { class: "mono wrap-text" }), cut, words);
}
