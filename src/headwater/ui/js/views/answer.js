// A response of the server: status, meaning, headers and body. Also the list of recent requests.

import { badge, button, h, openDialog, replace } from "../dom.js";
import { clock, span } from "../format.js";

const MEANINGS = {
  200: "Done.",
  201: "Created.",
  204: "Done (no content).",
  400: "The request is not valid.",
  401: "A token is required.",
  403: "Not allowed.",
  404: "Not found.",
  409: "Conflict with the current state.",
  410: "Deleted or no longer stored.",
  412: "The stream is closed.",
  413: "Too large.",
  429: "Too many requests.",
  503: "The server does not accept writes at the moment.",
};

/** Headers that are not about the stream. */
const PLUMBING = /^(access-control-|cross-origin-|x-content-type|date$|connection$|keep-alive$|content-length$|vary$)/;

/** The meaning of a status for a producer (protocol §5.2.1). */
export function producerMeaning(status, headers) {
  if (status === 200) return "Accepted: new data, stored once.";
  if (status === 204) return headers.get("stream-closed") === "true" ? "Done." : "Duplicate: this epoch and sequence number are already stored, so nothing was added.";
  if (status === 403) return `Fenced: this producer has already written with a newer epoch (${headers.get("producer-epoch") ?? "?"}). Use a higher one.`;
  if (status === 409 && headers.get("producer-expected-seq") !== null) {
    return `Gap: the server expects sequence number ${headers.get("producer-expected-seq")} and received ${headers.get("producer-received-seq")}.`;
  }
  if (status === 400) return "A new epoch must begin with sequence number 0, and all three producer headers are required.";
  return null;
}

export function statusKind(status) {
  if (status === null) return "bad";
  return status < 300 ? "good" : status < 400 ? "life" : "bad";
}

export function answerPanel(app, entry, { meaning, body } = {}) {
  const status = entry.status === null ? "no response" : String(entry.status);
  return h(
    "div",
    { class: "answer", "data-status": status },
    h("div", { class: "answer-head" }, badge(status, statusKind(entry.status)), h("span", { class: "grow", text: meaning || entry.error || MEANINGS[entry.status] || "" }), entry.ms !== null && h("span", { class: "muted", text: span(entry.ms) }), button("curl", () => app.copyCurl(entry), { symbol: "terminal", kind: "quiet small", title: "Copy as curl" })),
    headerTable(entry.answer.filter(([name]) => !PLUMBING.test(name))),
    body ? h("pre", { class: "mono block", text: body }) : null,
    entry.answer.length > 0 && h("details", { class: "more-headers" }, h("summary", { text: "all headers" }), headerTable(entry.answer)),
  );
}

export function headerTable(pairs) {
  return h("table", { class: "headers" }, h("tbody", {}, pairs.map(([name, value]) => h("tr", {}, h("th", { scope: "row", text: name }), h("td", { class: "mono", text: value })))));
}

export function openRequestLog(app) {
  const body = h("div", { class: "requests" });
  const draw = () => {
    replace(
      body,
      app.client.log.length === 0 && h("p", { class: "muted", text: "No requests yet." }),
      app.client.log.slice(0, 100).map((entry) =>
        h(
          "details",
          {},
          h("summary", {}, badge(entry.status ?? "–", statusKind(entry.status)), h("span", { class: "method", text: entry.method }), h("span", { class: "mono ellipsis grow", text: entry.path + queryText(entry.query) }), h("span", { class: "muted", text: clock(entry.at) })),
          answerPanel(app, entry),
        ),
      ),
    );
  };
  draw();
  openDialog("Requests", body, { wide: true });
}

function queryText(query) {
  const pairs = Object.entries(query || {}).filter(([, value]) => value !== null && value !== undefined);
  return pairs.length ? `?${pairs.map(([key, value]) => `${key}=${value}`).join("&")}` : "";
}
