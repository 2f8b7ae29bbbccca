// Which server, and with which token. The token lives in this page's memory; only if asked to, in this tab's session.

import { button, field, form, h, openDialog } from "../dom.js";
import { session } from "../store.js";

export function openConnection(app) {
  const base = h("input", { id: "base-url", class: "mono", value: app.client.base, spellcheck: "false", autocomplete: "off" });
  const token = h("input", { id: "token", class: "mono", type: "password", value: app.client.token, placeholder: "none", autocomplete: "off" });
  const keep = h("input", { id: "keep-token", type: "checkbox", checked: Boolean(session.token()) });
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  let dialog = null;
  const body = form(
    {
      class: "stack",
      onsubmit() {
        const address = base.value.trim().replace(/\/+$/, "") || app.home;
        if (!/^https?:\/\/[^\s/]+/.test(address)) {
          problem.hidden = false;
          problem.textContent = "An address begins with http:// or https://.";
          return;
        }
        session.set(address === app.home ? null : address, token.value.trim(), keep.checked);
        dialog.close();
        app.connect(address, token.value.trim());
      },
    },
    field("Base address", base, "This server, or another: a proxy in front of it, any Durable Streams server that allows this page's origin."),
    field("Bearer token", token, "Sent as Authorization with every request. It is kept in memory, and gone when the page is."),
    h("label", { class: "check" }, keep, " keep it until this tab is closed"),
    problem,
    h("div", { class: "row end" }, button("This server", () => {
      base.value = app.home;
    }), button("Connect", undefined, { kind: "primary", type: "submit", id: "connect" })),
  );
  dialog = openDialog("Connection", body);
  base.focus();
}

const KEYS = [
  ["/", "filter the streams, or type a path"],
  ["↑ ↓  j k", "move in a list; Enter opens"],
  ["n", "new stream"],
  ["a", "append to the open stream"],
  ["p", "pause, or go on"],
  ["f", "follow the newest"],
  ["s", "search in what is loaded"],
  ["1 2 3 4", "tabs of a stream"],
  ["g", "go to the list"],
  ["r", "requests made so far"],
  ["t", "light or dark"],
  ["Esc", "close what is open"],
];

export function openHelp() {
  openDialog("Keys", h("table", { class: "headers keys" }, h("tbody", {}, KEYS.map(([keys, what]) => h("tr", {}, h("th", { scope: "row" }, keys.split(/\s+/).map((key) => h("kbd", { text: key }))), h("td", { text: what }))))));
}
