// Dialogs that change a stream: create, fork, close, delete. Each can copy its request as curl before sending it.

import { Address, explain, refusal } from "../client.js";
import { button, field, form, h, openDialog, select, toast } from "../dom.js";
import { plural } from "../format.js";
import { typedAddress } from "./sidebar.js";

const TYPES = [
  ["application/json", "application/json: messages are JSON values"],
  ["text/plain", "text/plain: text"],
  ["application/octet-stream", "application/octet-stream: bytes"],
  ["other", "other type"],
];

/** A form in a dialog. `request()` returns the request to send; `done(response)` is called after it succeeded. */
function requestDialog(app, title, controls, { request, done, action, kind = "primary", note }) {
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const show = (error) => {
    problem.hidden = false;
    problem.textContent = explain(error);
  };
  let dialog = null;
  const body = form(
    {
      class: "stack",
      async onsubmit() {
        problem.hidden = true;
        try {
          const response = await app.client.send(request());
          if (!response.ok) throw await refusal(response);
          dialog.close();
          done(response);
        } catch (error) {
          show(error);
        }
      },
    },
    controls,
    note && h("p", { class: "muted", text: note }),
    problem,
    h(
      "div",
      { class: "row end" },
      button("curl", () => {
        try {
          app.copyCurl(request());
        } catch (error) {
          show(error);
        }
      }, { symbol: "terminal", kind: "quiet", title: "Copy as curl" }),
      button("Cancel", () => dialog.close()),
      button(action, undefined, { kind, type: "submit", id: "dialog-submit" }),
    ),
  );
  dialog = openDialog(title, body);
  return dialog;
}

export function openCreate(app, { bucket = null, name = "" } = {}) {
  const nameInput = h("input", { id: "create-name", class: "mono", value: bucket ? `/ds/${bucket}/${name}` : name, placeholder: "orders/2026 or /ds/bucket/stream", autocomplete: "off", spellcheck: "false" });
  const type = select(TYPES, "application/json", { id: "create-type" });
  const other = h("input", { id: "create-other-type", placeholder: "image/png", hidden: true, "aria-label": "Content type" });
  type.addEventListener("change", () => (other.hidden = type.value !== "other"));
  const ttl = h("input", { id: "create-ttl", inputmode: "numeric", placeholder: "none", autocomplete: "off" });
  const expires = h("input", { id: "create-expires", type: "datetime-local", step: "1" });
  const closed = h("input", { id: "create-closed", type: "checkbox" });
  const first = h("textarea", { id: "create-body", class: "mono", rows: "3", placeholder: "optional", spellcheck: "false" });
  const address = () => {
    const found = typedAddress(nameInput.value, app.client.base);
    if (!found.name) throw new Error("Enter a name for the stream.");
    return found;
  };
  const request = () => {
    const headers = { "Content-Type": type.value === "other" ? other.value.trim() : type.value };
    if (ttl.value.trim()) headers["Stream-TTL"] = ttl.value.trim();
    if (expires.value) headers["Stream-Expires-At"] = new Date(expires.value).toISOString();
    if (closed.checked) headers["Stream-Closed"] = "true";
    return { method: "PUT", path: address().path, headers, body: first.value || undefined };
  };
  requestDialog(
    app,
    "New stream",
    [
      field("Name", nameInput, "Names can contain slashes. A stream in a bucket begins with /ds/."),
      field("Content type", type),
      other,
      h("div", { class: "fields" }, field("TTL in seconds", ttl, "Restarted by each read or write."), field("Expires at", expires, "Your local time.")),
      field("Initial messages", first),
      h("label", { class: "check" }, closed, " create the stream closed, so that nothing can be appended"),
    ],
    {
      request,
      action: "Create",
      done(response) {
        toast(response.status === 201 ? "Created." : "A stream with this configuration already exists.");
        app.go(address().hash);
      },
    },
  );
  nameInput.focus();
}

export function openFork(app, source, offset = "") {
  const name = h("input", { id: "fork-name", class: "mono", value: `${source.name}-fork`, autocomplete: "off", spellcheck: "false" });
  const at = h("input", { id: "fork-offset", class: "mono", value: offset, placeholder: "end of the stream", autocomplete: "off", spellcheck: "false" });
  const sub = h("input", { id: "fork-sub-offset", inputmode: "numeric", placeholder: "0", autocomplete: "off" });
  const ttl = h("input", { id: "fork-ttl", inputmode: "numeric", placeholder: "same as the source", autocomplete: "off" });
  const target = () => new Address(name.value.trim().replace(/^\/+|\/+$/g, ""), source.bucket);
  const request = () => {
    if (!name.value.trim()) throw new Error("Enter a name for the fork.");
    const headers = { "Stream-Forked-From": source.path };
    if (at.value.trim()) headers["Stream-Fork-Offset"] = at.value.trim();
    if (sub.value.trim()) headers["Stream-Fork-Sub-Offset"] = sub.value.trim();
    if (ttl.value.trim()) headers["Stream-TTL"] = ttl.value.trim();
    return { method: "PUT", path: target().path, headers };
  };
  requestDialog(
    app,
    `Fork ${source.title}`,
    [
      field("Name of the fork", name),
      field("Fork offset", at, "Empty: the end of the source, so that the fork has all its messages."),
      h("div", { class: "fields" }, field("Sub-offset", sub, "Messages (JSON) or bytes after the offset."), field("TTL in seconds", ttl)),
    ],
    {
      request,
      action: "Fork",
      note: "The fork starts with the data of the source up to this offset and is independent from there on.",
      done() {
        toast("Forked.");
        app.go(target().hash);
      },
    },
  );
  name.select();
}

export function openClose(app, address, done) {
  requestDialog(app, `Close ${address.title}?`, [h("p", { text: "Nothing more can be appended, and readers learn that they have reached the end. A closed stream cannot be opened again." })], {
    request: () => ({ method: "POST", path: address.path, headers: { "Stream-Closed": "true" } }),
    action: "Close stream",
    kind: "danger",
    done,
  });
}

export function openDelete(app, address, info, done) {
  const what = info?.messages ? `${address.title} and its ${plural(info.messages, "message")}` : address.title;
  requestDialog(app, `Delete ${what}?`, [h("p", { text: "This cannot be undone." })], {
    request: () => ({ method: "DELETE", path: address.path }),
    action: "Delete stream",
    kind: "danger",
    note: "If the stream has forks, its data is kept for them; reading the stream itself returns 410.",
    done,
  });
}

/** Confirm and send a request that cannot be undone. */
export function openConfirm(app, title, text, { request, action, done }) {
  requestDialog(app, title, [h("p", { text })], { request, action, kind: "danger", done });
}

export { requestDialog };
