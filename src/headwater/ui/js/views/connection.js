// Choose the server and the token. The token is kept in memory, or on request in the session storage of this tab.

import { button, field, form, h, openDialog } from "../dom.js";
import { session } from "../store.js";

export function openConnection(app, wantsToken = false) {
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
          problem.textContent = "The URL must begin with http:// or https://.";
          return;
        }
        session.set(address === app.home ? null : address, token.value.trim(), keep.checked);
        dialog.close();
        app.connect(address, token.value.trim());
      },
    },
    field("Server URL", base, "This server, a proxy in front of it, or any Durable Streams server that allows the origin of this page."),
    field("Bearer token", token, "Sent as Authorization header with every request. Kept in memory until you leave the page."),
    h("label", { class: "check" }, keep, " keep the token until this tab is closed"),
    problem,
    h("div", { class: "row end" }, button("This server", () => {
      base.value = app.home;
    }), button("Connect", undefined, { kind: "primary", type: "submit", id: "connect" })),
  );
  dialog = openDialog("Connection", body);
  (wantsToken ? token : base).focus();
}

const KEYS = [
  ["/", "filter the streams, or enter a path"],
  ["↑ ↓  j k", "move in a list; Enter opens the entry"],
  ["n", "new stream"],
  ["a", "append to the open stream"],
  ["p", "pause or resume"],
  ["f", "follow new messages"],
  ["s", "search loaded messages"],
  ["1 2 3 4", "select a tab of the stream"],
  ["g", "go to the list of streams"],
  ["r", "show recent requests"],
  ["t", "switch light and dark colours"],
  ["Esc", "close the open panel"],
];

export function openHelp() {
  openDialog("Keys", h("table", { class: "headers keys" }, h("tbody", {}, KEYS.map(([keys, what]) => h("tr", {}, h("th", { scope: "row" }, keys.split(/\s+/).map((key) => h("kbd", { text: key }))), h("td", { text: what }))))));
}
