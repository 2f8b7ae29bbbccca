// The Messages tab: read pages, then follow live; pause, search, and open one message.

import { explain } from "../client.js";
import { badge, button, h, icon, replace, select, toast } from "../dom.js";
import { bytes, clock, count, plural, span } from "../format.js";
import { shortOffset } from "../messages.js";
import { Plot } from "../plot.js";
import { StreamReader } from "../reader.js";
import { VirtualList } from "../virtual.js";
import { Detail } from "./detail.js";

const ROW_PX = 26;
const PAGE_LIMIT = 100_000;
const KEPT_MAX = 200_000;
const DROPPED_AT_ONCE = 20_000;

const STATES = {
  opening: ["opening", "plain"],
  "catching-up": ["catching up", "life"],
  held: ["waiting", "life"],
  live: ["live", "good"],
  paused: ["paused", "plain"],
  reconnecting: ["reconnecting", "warn"],
  ended: ["end of stream", "closed"],
  failed: ["stopped", "bad"],
  stopped: ["stopped", "plain"],
};

export class MessagesView {
  constructor(app, address, info, { from = "-1", onprogress }) {
    this.app = app;
    this.address = address;
    this.info = info;
    this.onprogress = onprogress;
    this.messages = [];
    this.found = null;
    this.dropped = 0;
    this.number = 0;
    this.follow = true;
    this.mode = info.json ? "json" : info.text ? "text" : "hex";
    this.from = from;
    this.#build();
    this.#open();
  }

  stop() {
    this.reader?.stop();
    this.plot.stop();
    clearTimeout(this.searching);
  }

  #build() {
    this.list = new VirtualList({
      rowHeight: ROW_PX,
      label: "Messages",
      id: "messages",
      render: (index) => this.#row(index),
      onopen: (index) => this.#show(this.#shown[index]),
      onscroll: () => this.#scrolled(),
      onresize: () => this.follow && this.list.toEnd(),
    });
    this.list.element.addEventListener("wheel", (event) => event.deltaY < 0 && this.#setFollow(false), { passive: true });
    this.list.element.addEventListener("keydown", (event) => {
      if (["ArrowUp", "PageUp", "Home", "k"].includes(event.key)) this.#setFollow(false);
    }, true);
    this.startSelect = select([["-1", "from the beginning"], ["now", "from now"], ["offset", "from an offset"]], "-1", { "aria-label": "Start offset", id: "from", onchange: () => this.#startChanged() });
    this.offsetInput = h("input", { class: "mono offset-input", id: "from-offset", placeholder: "offset", "aria-label": "Offset", spellcheck: "false", hidden: true, onkeydown: (event) => event.key === "Enter" && this.#restart() });
    this.transport = select([["auto", "live: auto"], ["sse", "live: SSE"], ["long-poll", "live: long-poll"]], "auto", { "aria-label": "Live transport", id: "transport", onchange: () => this.reader.use(this.transport.value) });
    this.view = select([["json", "JSON"], ["text", "text"], ["hex", "hex"]], this.mode, { "aria-label": "Show as", id: "view", onchange: () => this.#setMode(this.view.value) });
    this.search = h("input", { type: "search", id: "search", placeholder: "Search loaded messages", "aria-label": "Search loaded messages", oninput: () => this.#searchSoon() });
    this.pauseButton = button("Pause", () => this.togglePause(), { symbol: "pause", title: "Pause or resume (p)", id: "pause" });
    this.followButton = button("Follow", () => this.#setFollow(!this.follow), { symbol: "down", title: "Stay at the newest message (f)", id: "follow" });
    this.status = h("div", { class: "reader-status", id: "reader-status" });
    this.foundNote = h("span", { class: "muted", id: "found" });
    this.canvas = h("canvas", { class: "plot", "aria-label": "Messages per second and delivery time, last minute", role: "img" });
    this.plot = new Plot(this.canvas);
    this.rates = h("div", { class: "rates muted", id: "rates" });
    this.note = h("div", { class: "notice", hidden: true, id: "reader-notice" });
    this.detail = new Detail(this.app, this.address, () => this.list.element.focus());
    const curl = () => {
      const query = { offset: this.#start, live: this.transport.value === "long-poll" ? "long-poll" : "sse" };
      this.app.copyCurl({ path: this.address.path, query, live: true });
    };
    this.element = h(
      "section",
      { class: "messages-view" },
      h(
        "div",
        { class: "toolbar" },
        this.startSelect,
        this.offsetInput,
        this.transport,
        this.pauseButton,
        this.followButton,
        h("div", { class: "search grow" }, icon("search"), this.search),
        this.foundNote,
        this.view,
        button("", curl, { symbol: "terminal", kind: "quiet", title: "Copy this read as curl" }),
      ),
      h("div", { class: "status-row" }, h("div", { class: "status-line" }, this.status, this.rates), this.canvas),
      this.note,
      h("div", { class: "split" }, h("div", { class: "list-pane" }, h("div", { class: "columns message-row", "aria-hidden": "true" }, h("span", { text: "#" }), h("span", { class: "offset", text: "next offset", title: "Without leading zeros; open a message for the full offset" }), h("span", { class: "time", text: "received" }), h("span", { class: "size", text: "size" }), h("span", { text: "message" })), this.list.element), this.detail.element),
    );
    this.ticker = setInterval(() => this.element.isConnected && this.#drawRates(), 1000);
    if (this.from === "now") this.startSelect.value = "now";
    else if (this.from !== "-1") {
      this.startSelect.value = "offset";
      this.offsetInput.hidden = false;
      this.offsetInput.value = this.from;
    }
    this.#setFollow(true);
  }

  get #start() {
    return this.startSelect.value === "offset" ? this.offsetInput.value.trim() || "-1" : this.startSelect.value;
  }

  get #shown() {
    return this.found ?? this.messages;
  }

  #startChanged() {
    this.offsetInput.hidden = this.startSelect.value !== "offset";
    if (this.startSelect.value === "offset") this.offsetInput.focus();
    else this.#restart();
  }

  /** Read from this offset, as if the user had typed it. */
  readFrom(offset) {
    this.startSelect.value = "offset";
    this.offsetInput.hidden = false;
    this.offsetInput.value = offset;
    this.#restart();
  }

  #restart() {
    this.reader.stop();
    this.messages = [];
    this.found = null;
    this.search.value = "";
    this.foundNote.textContent = "";
    this.dropped = 0;
    this.number = 0;
    this.detail.close();
    this.list.setCount(0);
    this.list.refresh();
    this.#setFollow(true);
    this.#open();
  }

  #open() {
    this.reader = new StreamReader(this.app.client, this.address, {
      from: this.#start,
      mode: this.transport.value,
      limit: PAGE_LIMIT,
      onmessages: (messages, reader) => reader === this.reader && this.#received(messages),
      onstate: (reader) => (reader === this.reader || this.reader === undefined) && this.#state(reader),
    });
    this.reader.start();
    this.#state(this.reader);
  }

  #received(messages) {
    let delays = 0;
    for (const message of messages) {
      message.number = this.number;
      this.number += 1;
      const delay = this.app.delays.of(this.address.path, message);
      if (delay !== null && delays < 50) {
        delays += 1;
        this.plot.add(0, delay);
      }
    }
    if (messages[0].live) this.plot.add(messages.length);
    // A page can have 100,000 messages, too many for spread arguments.
    for (const message of messages) this.messages.push(message);
    if (this.found) {
      const matches = this.#matcher();
      for (const message of messages) if (matches(message)) this.found.push(message);
    }
    let taken = 0;
    if (this.messages.length > KEPT_MAX + DROPPED_AT_ONCE) {
      taken = this.messages.length - KEPT_MAX;
      this.messages.splice(0, taken);
      this.dropped += taken;
      if (this.found) this.#searchNow();
    }
    this.#drawSoon(this.found ? 0 : taken);
    this.onprogress?.(this.reader);
  }

  #drawSoon(taken) {
    this.taken = (this.taken || 0) + taken;
    if (this.drawing) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = 0;
      this.list.setCount(this.#shown.length);
      if (this.taken) this.list.shift(this.taken);
      this.taken = 0;
      if (this.found) this.foundNote.textContent = `${count(this.found.length)} found`;
      if (this.follow) this.list.toEnd();
      this.#state(this.reader);
    });
  }

  #state(reader) {
    const [name, kind] = STATES[reader.state];
    const over = reader.state === "live" ? ` over ${reader.transport === "sse" ? "SSE" : "long-poll"}` : "";
    this.status.dataset.state = reader.state;
    this.status.dataset.loaded = this.messages.length + this.dropped;
    this.status.dataset.transport = reader.transport || "";
    replace(
      this.status,
      badge(name + over, kind),
      h("span", { text: `${plural(this.messages.length, "message")} loaded` }),
      this.dropped > 0 && h("span", { class: "muted", text: `${count(this.dropped)} older messages dropped` }),
      h("span", { class: "mono muted ellipsis", id: "next-offset", title: `Stream-Next-Offset: ${reader.offset}`, text: reader.offset === "-1" ? "" : `next ${shortOffset(reader.offset)}` }),
      reader.reconnects > 0 && h("span", { class: "muted", text: plural(reader.reconnects, "reconnect") }),
    );
    const isPaused = reader.state === "paused";
    replace(this.pauseButton, icon(isPaused ? "play" : "pause"), h("span", { text: isPaused ? "Resume" : "Pause" }));
    this.#notice(reader);
    this.onprogress?.(reader);
  }

  #notice(reader) {
    const { error, state } = reader;
    this.note.hidden = !(state === "held" || state === "failed" || state === "reconnecting");
    if (state === "held") {
      replace(this.note, h("p", { text: `${plural(this.messages.length, "message")} loaded; the stream has more.` }), button(`Load ${count(PAGE_LIMIT)} more`, () => reader.more(PAGE_LIMIT), { kind: "primary" }), button("Skip to the newest messages", () => reader.skip()));
    } else if (state === "reconnecting") replace(this.note, h("p", { text: `${explain(error)} Retrying from the last offset; no message is lost or repeated.` }));
    else if (state === "failed") {
      const { earliest } = error;
      const text = earliest ? `${explain(error)} Messages before ${earliest} are no longer stored${this.info.snapshot ? "; the Snapshots tab has their state" : ""}.` : explain(error);
      replace(this.note, h("p", { text }), earliest ? button("Read stored messages", () => this.readFrom(earliest), { kind: "primary" }) : button("Read from the beginning", () => this.#fromStart(), { kind: "primary" }));
    }
  }

  #fromStart() {
    this.startSelect.value = "-1";
    this.offsetInput.hidden = true;
    this.#restart();
  }

  #drawRates() {
    const { rate, median, samples } = this.plot.summary();
    const shownRate = rate >= 10 || rate === 0 ? Math.round(rate) : rate.toFixed(1);
    const delay = samples ? `delivery time ${span(median)} (median of ${count(samples)})` : "";
    // The legend of the chart: bars and dots.
    replace(this.rates, h("span", { class: "legend", text: `${shownRate} messages/s` }), delay !== "" && h("span", { class: "legend delays", text: delay }));
    this.rates.title = delay === "" ? "The delivery time is known for messages that you append here, and for messages with a timestamp." : "";
  }

  #row(index) {
    const message = this.#shown[index];
    const row = h(
      "div",
      { class: `message-row${message.live ? " is-live" : ""}` },
      h("span", { class: "mono muted", text: String(message.index ?? message.number + this.dropped) }),
      h("span", { class: "mono muted offset ellipsis", text: shortOffset(message.end), title: message.end ?? "" }),
      h("span", { class: "mono muted time", text: message.live ? clock(message.at) : "" }),
      h("span", { class: "muted size", text: bytes(message.size) }),
      h("span", { class: "mono ellipsis preview" }),
    );
    highlight(row.lastChild, message.preview(this.mode), this.found ? this.search.value.trim() : "");
    return row;
  }

  #show(message) {
    if (!message) return;
    this.#setFollow(false);
    this.detail.show(message, this.mode, (offset) => this.readFrom(offset));
  }

  #scrolled() {
    if (this.list.atEnd && !this.follow && this.reader.state === "live" && this.wasAway) this.#setFollow(true);
    this.wasAway = !this.list.atEnd;
  }

  #setFollow(on) {
    this.follow = on;
    this.followButton.setAttribute("aria-pressed", String(on));
    if (on) this.list.toEnd();
  }

  #setMode(mode) {
    this.mode = mode;
    this.list.refresh();
    this.detail.setMode(mode);
  }

  #searchSoon() {
    clearTimeout(this.searching);
    this.searching = setTimeout(() => {
      this.#searchNow();
      this.list.setCount(this.#shown.length);
      this.list.refresh();
    }, 120);
  }

  #matcher() {
    const wanted = this.search.value.trim().toLowerCase();
    return (message) => message.string().toLowerCase().includes(wanted);
  }

  #searchNow() {
    const wanted = this.search.value.trim();
    this.found = wanted === "" ? null : this.messages.filter(this.#matcher());
    this.foundNote.textContent = this.found ? `${count(this.found.length)} found` : "";
  }

  togglePause() {
    if (this.reader.wanted === "pause") this.reader.resume();
    else if (this.reader.state === "ended" || this.reader.state === "failed") toast("The page is not reading this stream.");
    else this.reader.pause();
  }

  key(key) {
    if (key === "p") this.togglePause();
    else if (key === "f") this.#setFollow(!this.follow);
    else if (key === "s") this.search.focus();
    else if (key === "Escape" && this.detail.message) this.detail.close();
    else return false;
    return true;
  }
}

/** Set the text of an element, with every occurrence of a word marked. */
function highlight(element, text, word) {
  if (!word) {
    element.textContent = text;
    return;
  }
  const lower = text.toLowerCase();
  const wanted = word.toLowerCase();
  let at = 0;
  for (let found = lower.indexOf(wanted); found >= 0; found = lower.indexOf(wanted, at)) {
    element.append(text.slice(at, found), h("mark", { text: text.slice(found, found + wanted.length) }));
    at = found + wanted.length;
  }
  element.append(text.slice(at));
}
