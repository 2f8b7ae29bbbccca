// One row of the message list: number, offset, time, size, chosen fields, and the message on one line.

import { h } from "../dom.js";
import { field, fieldText } from "../filter.js";
import { bytes, oneLine, when } from "../format.js";
import { shortOffset } from "../messages.js";

const JSON_TOKEN = /("(?:[^"\\]|\\.)*")(\s*:)?|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\btrue\b|\bfalse\b|\bnull\b/g;

/** The style of a row: the fields share a third of the width. */
export function rowStyle(fields) {
  return fields.length === 0 ? null : `--fields: repeat(${fields.length}, minmax(60px, 1fr))`;
}

export function columnHead(element, fields) {
  element.style.cssText = rowStyle(fields) ?? "";
  element.classList.toggle("with-fields", fields.length > 0);
  element.replaceChildren(
    h("span", { text: "#" }),
    h("span", { class: "offset", text: "next offset", title: "Without leading zeros; open a message for the full offset" }),
    h("span", { class: "time", text: "received", title: "When the server or, for live messages, this page received it" }),
    h("span", { class: "size", text: "size" }),
    ...fields.map((name) => h("span", { class: "ellipsis field", text: name, title: name })),
    h("span", { text: "message" }),
  );
}

export function messageRow(message, { mode, words, fields, number }) {
  const value = fields.length > 0 ? parsed(message) : undefined;
  const received = message.live ? message.at : message.time;
  const row = h(
    "div",
    { class: `message-row${message.live ? " is-live" : ""}${fields.length > 0 ? " with-fields" : ""}`, style: rowStyle(fields) },
    h("span", { class: "mono muted", text: String(message.index ?? number) }),
    h("span", { class: "mono muted offset ellipsis", text: shortOffset(message.end), title: message.end ?? "" }),
    h("span", { class: "mono muted time", text: received ? when(received) : "", title: received ? new Date(received).toISOString() : "" }),
    h("span", { class: "muted size", text: bytes(message.size) }),
    fields.map((name) => marked(h("span", { class: "mono ellipsis field" }), oneLine(fieldText(field(value, name.split("."))), 200), words)),
    h("span", { class: "mono ellipsis preview" }),
  );
  const preview = row.lastChild;
  const text = message.preview(mode);
  if (mode === "json" && words.length === 0 && message.text !== null) colored(preview, text);
  else marked(preview, text, words);
  return row;
}

function parsed(message) {
  try {
    return JSON.parse(message.string());
  } catch {
    return undefined;
  }
}

/** Set the text of an element with the colours of JSON: names, strings, numbers and words. */
function colored(element, text) {
  let at = 0;
  for (const found of text.matchAll(JSON_TOKEN)) {
    element.append(text.slice(at, found.index));
    const [whole, string, colon] = found;
    const kind = string === undefined ? (/^[tfn]/.test(whole) ? "json-word" : "json-number") : colon === undefined ? "json-string" : "json-key";
    element.append(h("span", { class: kind, text: string ?? whole }), colon ?? "");
    at = found.index + whole.length;
  }
  element.append(text.slice(at));
}

/** Set the text of an element, with every occurrence of the words marked. */
export function marked(element, text, words) {
  const lower = text.toLowerCase();
  let at = 0;
  while (at < text.length) {
    let next = -1;
    let length = 0;
    for (const word of words) {
      const found = lower.indexOf(word, at);
      if (found >= 0 && (next < 0 || found < next)) {
        next = found;
        length = word.length;
      }
    }
    if (next < 0) break;
    element.append(text.slice(at, next), h("mark", { text: text.slice(next, next + length) }));
    at = next + length;
  }
  element.append(text.slice(at));
  return element;
}
