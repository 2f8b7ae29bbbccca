// A collapsible JSON tree. Children are created when a branch is first opened.

import { h } from "../dom.js";
import { Digits, Members } from "../json.js";

const OPEN_DEPTH = 2;
const CHILDREN_MAX = 500;
const STRING_MAX = 20_000;

export function tree(value, depth = 0) {
  if (value instanceof Members) return branch(value.entries, "{", "}", depth);
  if (Array.isArray(value)) return branch(value.map((child, at) => [String(at), child]), "[", "]", depth);
  return leaf(value);
}

function leaf(value) {
  if (typeof value === "string") {
    const text = JSON.stringify(value.length > STRING_MAX ? `${value.slice(0, STRING_MAX)}…` : value);
    return h("span", { class: "json-string", text });
  }
  if (value instanceof Digits) return h("span", { class: "json-number", text: value.text });
  return h("span", { class: "json-word", text: String(value) });
}

function branch(entries, open, close, depth) {
  if (entries.length === 0) return h("span", { class: "json-mark", text: open + close });
  const details = h("details", { class: "json" });
  const hint = `${open}${entries.length === 1 ? "1 entry" : `${entries.length} entries`}${close}`;
  details.append(h("summary", {}, h("span", { class: "json-mark", text: hint })));
  let made = false;
  const make = () => {
    if (made) return;
    made = true;
    const shown = entries.slice(0, CHILDREN_MAX);
    details.append(
      h(
        "ul",
        {},
        shown.map(([key, child]) => h("li", {}, h("span", { class: "json-key", text: key }), h("span", { class: "json-mark", text: ": " }), tree(child, depth + 1))),
        entries.length > shown.length && h("li", { class: "muted", text: `… ${entries.length - shown.length} more` }),
      ),
    );
  };
  if (depth < OPEN_DEPTH) {
    make();
    details.open = true;
  }
  details.addEventListener("toggle", () => details.open && make());
  return details;
}
