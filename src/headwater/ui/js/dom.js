// Create elements. Content of streams is inserted only as text nodes, never as markup: no other file creates elements, and
// no function here parses markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `props`: class, text, attributes; a function is a listener (`onclick`), `data` fills the dataset. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "text") element.textContent = value;
    else if (name === "style") element.style.cssText = value; // the policy of the page forbids the attribute
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "value") element.value = value;
    else if (name === "checked" || name === "disabled" || name === "readOnly" || name === "hidden") element[name] = value;
    else if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(3)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export function replace(element, ...children) {
  element.replaceChildren();
  return append(element, children);
}

const ICONS = {
  wave: ["M2 9c2.5 0 2.5-3 5-3s2.5 3 5 3 2.5-3 5-3 2.5 3 5 3", "M2 15c2.5 0 2.5-3 5-3s2.5 3 5 3 2.5-3 5-3 2.5 3 5 3"],
  plus: ["M12 5v14M5 12h14"],
  search: ["M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14zM20 20l-4-4"],
  copy: ["M9 9h11v11H9z", "M5 15H4V4h11v1"],
  terminal: ["M4 6l6 6-6 6M12 19h8"],
  pause: ["M8 5v14M16 5v14"],
  play: ["M7 4l13 8-13 8z"],
  down: ["M12 4v15M6 13l6 6 6-6"],
  trash: ["M4 7h16M9 7V4h6v3M6 7l1 13h10l1-13"],
  fork: ["M7 4v10a3 3 0 0 0 3 3h4", "M17 4v6a3 3 0 0 1-3 3H7", "M7 3a1 1 0 1 0 0 2 1 1 0 0 0 0-2zM17 3a1 1 0 1 0 0 2 1 1 0 0 0 0-2z"],
  lock: ["M6 11h12v9H6z", "M8 11V8a4 4 0 0 1 8 0v3"],
  send: ["M4 12l16-8-5 16-3-7z"],
  back: ["M14 5l-7 7 7 7"],
  close: ["M6 6l12 12M18 6L6 18"],
  sun: ["M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8z", "M12 2v2M12 20v2M4.9 4.9l1.4 1.4M17.7 17.7l1.4 1.4M2 12h2M20 12h2M4.9 19.1l1.4-1.4M17.7 6.3l1.4-1.4"],
  moon: ["M20 14.5A8 8 0 0 1 9.5 4 8 8 0 1 0 20 14.5z"],
  link: ["M10 14a4 4 0 0 0 6 0l3-3a4 4 0 0 0-6-6l-1 1", "M14 10a4 4 0 0 0-6 0l-3 3a4 4 0 0 0 6 6l1-1"],
  log: ["M5 5h14M5 10h14M5 15h9M5 20h6"],
  help: ["M9 9a3 3 0 1 1 4.5 2.6c-1 .6-1.5 1.2-1.5 2.4M12 18v.5"],
  columns: ["M4 5h16v14H4z", "M10 5v14M15 5v14"],
  folder: ["M3 6h6l2 2h10v11H3z"],
  save: ["M12 4v11M7 10l5 5 5-5M4 20h16"],
  refresh: ["M19 8a8 8 0 1 0 1 6M20 3v5h-5"],
};

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [key, value] of Object.entries({ viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" })) {
    svg.setAttribute(key, value);
  }
  for (const d of ICONS[name]) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", d);
    svg.append(path);
  }
  return svg;
}

/** A button. Its title doubles as its accessible name where it shows only an icon. */
export function button(label, onclick, { symbol, kind = "", title, id, disabled, type = "button" } = {}) {
  const props = { class: `button ${kind}`.trim(), type, onclick, title, id, disabled };
  if (!label && title) props["aria-label"] = title;
  return h("button", props, symbol && icon(symbol), label && h("span", { text: label }));
}

export function badge(text, kind = "", title) {
  return h("span", { class: `badge ${kind}`.trim(), text, title });
}

export function field(label, control, hint) {
  return h("label", { class: "field" }, h("span", { class: "label", text: label }), control, hint && h("span", { class: "hint", text: hint }));
}

export function select(options, value, props = {}) {
  const element = h("select", props, options.map(([key, label]) => h("option", { value: key, text: label })));
  element.value = value;
  return element;
}

/** A small notice that goes away by itself; errors stay longer. */
export function toast(text, kind = "") {
  const place = document.getElementById("toasts");
  const note = h("div", { class: `toast ${kind}`.trim(), role: kind === "bad" ? "alert" : "status", text });
  place.append(note);
  setTimeout(() => note.remove(), kind === "bad" ? 8000 : 3000);
}

/** Offer bytes and texts as a file. */
export function saveFile(name, parts) {
  const url = URL.createObjectURL(new Blob(parts));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export async function copy(text, what = "Copied") {
  try {
    await navigator.clipboard.writeText(text);
    toast(what);
  } catch {
    // Without a secure context there is no clipboard: show the text, selected.
    const area = h("textarea", { class: "mono", rows: "8", readOnly: true, value: text });
    const dialog = openDialog("Copy this", h("div", { class: "stack" }, area));
    area.focus();
    area.select();
    return dialog;
  }
  return null;
}

/** A modal dialog with a heading and a body; it leaves the page when closed, also by the browser's Back. */
export function openDialog(title, body, { wide = false } = {}) {
  const dialog = h("dialog", { class: wide ? "wide" : "", "aria-label": title });
  const close = () => dialog.close();
  const head = h("header", {}, h("h2", { text: title }), button("", close, { symbol: "close", kind: "quiet", title: "Close" }));
  append(dialog, [head, h("div", { class: "dialog-body" }, body)]);
  addEventListener("hashchange", close);
  dialog.addEventListener("close", () => {
    removeEventListener("hashchange", close);
    dialog.remove();
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/** A form that calls `submit` with itself and shows what goes wrong beside its button. */
export function form(props, ...children) {
  const { onsubmit, ...rest } = props;
  const element = h("form", { novalidate: true, ...rest }, ...children);
  element.addEventListener("submit", async (event) => {
    event.preventDefault();
    await onsubmit(element);
  });
  return element;
}
