// The Messages tab: read pages, then follow live; pause, search, and open one message.

import { explain } from "../client.js";
import { badge, button, h, icon, openDialog, replace, saveFile, select, toast } from "../dom.js";
import { formats, parts } from "../export.js";
import { compile, fieldNames } from "../filter.js";
import { bytes, count, plural, span } from "../format.js";
import { shortOffset } from "../messages.js";
import { Plot } from "../plot.js";
import { firstStored } from "../position.js";
import { StreamReader } from "../reader.js";
import { WholeSearch } from "../search.js";
import { Columns } from "../store.js";
import { VirtualList } from "../virtual.js";
import { Detail } from "./detail.js";
import { columnHead, messageRow } from "./message_row.js";

const ROW_PX = 26;
const START = "last:100";
const OLDER = 1000;
const FIELDS_FROM = 200; // messages whose fields are offered as columns
const PAGE_LIMIT = 100_000;
const KEPT_MAX = 200_000;
const DROPPED_AT_ONCE = 20_000;

const SEARCH_HELP = 'Words and "phrases" that a message contains; conditions on JSON fields: user.name=ann, total>=10, note~flour (contains), kind!=test. Enter searches the whole stream on the server.';

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
  constructor(app, address, info, { from = START, message = null, onprogress, onagain }) {
    this.app = app;
    this.address = address;
    this.info = info;
    this.onprogress = onprogress;
    this.onagain = onagain;
    this.messages = [];
    this.found = null;
    this.dropped = 0;
    this.number = 0;
    this.follow = true;
    this.mode = info.json ? "json" : info.text ? "text" : "hex";
    this.from = message ?? from;
    this.wanted = message; // the message to open, from the URL
    this.columns = new Columns(app.client.base, address.path);
    this.fields = info.json ? this.columns.get() : [];
    this.filter = compile("", info.json);
    this.#build();
    this.#open();
  }

  stop() {
    this.reader?.stop();
    this.whole?.stop();
    this.plot.stop();
    clearTimeout(this.searching);
    clearInterval(this.ticker);
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
    this.startSelect = select([[START, "last 100"], ["-1", "from the beginning"], ["now", "from now"], this.info.times && ["time", "from a time"], ["offset", "from an offset"]].filter(Boolean), START, { "aria-label": "Start offset", id: "from", onchange: () => this.#startChanged() });
    this.offsetInput = h("input", { class: "mono offset-input", id: "from-offset", placeholder: "offset", "aria-label": "Offset", spellcheck: "false", hidden: true, onkeydown: (event) => event.key === "Enter" && this.#restart() });
    this.timeInput = h("input", { type: "datetime-local", step: "1", id: "from-time", "aria-label": "Time", hidden: true, onchange: () => this.#restart(), onkeydown: (event) => event.key === "Enter" && this.#restart() });
    this.transport = select([["auto", "live: auto"], ["sse", "live: SSE"], ["long-poll", "live: long-poll"]], "auto", { "aria-label": "Live transport", id: "transport", onchange: () => this.reader.use(this.transport.value) });
    this.view = select([["json", "JSON"], ["text", "text"], ["hex", "hex"]], this.mode, { "aria-label": "Show as", id: "view", onchange: () => this.#setMode(this.view.value) });
    this.search = h("input", { type: "search", id: "search", placeholder: this.info.json ? "Filter: words, field=value" : "Filter: words", "aria-label": "Filter messages", title: SEARCH_HELP, oninput: () => this.#searchSoon(), onkeydown: (event) => event.key === "Enter" && this.#searchAll() });
    this.pauseButton = button("Pause", () => this.togglePause(), { symbol: "pause", title: "Pause or resume (p)", id: "pause" });
    this.followButton = button("Follow", () => this.#setFollow(!this.follow), { symbol: "down", title: "Stay at the newest message (f)", id: "follow" });
    this.status = h("div", { class: "reader-status", id: "reader-status" });
    this.foundNote = h("span", { class: "muted", id: "found" });
    this.canvas = h("canvas", { class: "plot", "aria-label": "Messages per second and delivery time, last minute", role: "img" });
    this.plot = new Plot(this.canvas);
    this.rates = h("div", { class: "rates muted", id: "rates" });
    this.note = h("div", { class: "notice", hidden: true, id: "reader-notice" });
    this.olderBar = h("span", { class: "older", hidden: true, id: "older" });
    this.empty = h("div", { class: "empty", hidden: true, id: "no-messages" });
    this.head = h("div", { class: "columns message-row", "aria-hidden": "true" });
    this.#drawColumns();
    this.detail = new Detail(this.app, this.address, () => {
      this.#setUrl(null);
      this.list.element.focus();
    }, this.onagain);
    const curl = () => {
      const start = this.#start;
      const place = start.startsWith("since:") ? { since: start.slice(6) } : { offset: start === START ? "-1" : start };
      const query = { ...place, live: this.transport.value === "long-poll" ? "long-poll" : "sse" };
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
        this.timeInput,
        this.transport,
        this.pauseButton,
        this.followButton,
        h("div", { class: "search grow" }, icon("search"), this.search),
        this.info.json && button("", () => this.#chooseFields(), { symbol: "columns", kind: "quiet", title: "Choose fields as columns", id: "fields" }),
        this.view,
        button("", () => this.#download(), { symbol: "save", kind: "quiet", title: "Download the messages in the list", id: "download" }),
        button("", curl, { symbol: "terminal", kind: "quiet", title: "Copy this read as curl", id: "copy-read" }),
      ),
      h("div", { class: "status-row" }, h("div", { class: "status-line" }, this.status, this.olderBar, this.foundNote, this.rates), this.canvas),
      this.note,
      h("div", { class: "split" }, h("div", { class: "list-pane" }, this.head, this.list.element, this.empty), this.detail.element),
    );
    this.ticker = setInterval(() => this.element.isConnected && this.#drawRates(), 1000);
    if (["now", "-1", START].includes(this.from)) this.startSelect.value = this.from;
    else {
      this.startSelect.value = "offset";
      this.offsetInput.hidden = false;
      this.offsetInput.value = this.from;
    }
    this.#setFollow(true);
  }

  get #start() {
    const chosen = this.startSelect.value;
    if (chosen === "offset") return this.offsetInput.value.trim() || "-1";
    if (chosen === "time") return this.timeInput.value ? `since:${new Date(this.timeInput.value).toISOString()}` : START;
    return chosen;
  }

  get #shown() {
    return this.whole?.messages ?? this.found ?? this.messages;
  }

  #startChanged() {
    this.offsetInput.hidden = this.startSelect.value !== "offset";
    this.timeInput.hidden = this.startSelect.value !== "time";
    if (this.startSelect.value === "offset") this.offsetInput.focus();
    else if (this.startSelect.value === "time") this.timeInput.focus();
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
    this.whole?.stop();
    this.messages = [];
    this.found = null;
    this.whole = null;
    this.search.value = "";
    this.#searchNow();
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
    if (this.found) for (const message of messages) if (this.filter.test(message)) this.found.push(message);
    if (this.wanted !== null) this.#openWanted();
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
      this.#drawFound();
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
      h("span", { id: "counts", text: this.#counts() }),
      this.dropped > 0 && h("span", { class: "muted", text: `${count(this.dropped)} older messages dropped` }),
      h("span", { class: "mono muted ellipsis", id: "next-offset", title: `Stream-Next-Offset: ${reader.offset}`, text: reader.offset === "-1" ? "" : `next ${shortOffset(reader.offset)}` }),
      reader.reconnects > 0 && h("span", { class: "muted", text: plural(reader.reconnects, "reconnect") }),
    );
    const isPaused = reader.state === "paused";
    replace(this.pauseButton, icon(isPaused ? "play" : "pause"), h("span", { text: isPaused ? "Resume" : "Pause" }));
    this.#notice(reader);
    this.#drawOlder();
    this.#drawEmpty(reader);
    this.onprogress?.(reader);
  }

  /** The number of messages of the stream, as far as this page knows. */
  get total() {
    const last = this.messages.at(-1);
    const seen = last && last.index !== null ? last.index + 1 : null;
    return seen === null ? this.info.messages : Math.max(seen, this.info.messages ?? 0);
  }

  #counts() {
    const { total } = this;
    const loaded = this.messages.length;
    if (total === null) return `${plural(loaded, "message")} loaded`;
    return loaded === total ? plural(total, "message") : `${count(loaded)} of ${plural(total, "message")} loaded`;
  }

  /** The bar above the list, while the stream has messages before the first loaded one. */
  #drawOlder() {
    const first = this.messages[0];
    const left = first && first.index !== null && this.info.frames ? first.index - firstStored(this.info).index : 0;
    const shown = left > 0 && this.#shown === this.messages && this.dropped === 0;
    this.olderBar.hidden = !shown;
    if (!shown || this.olderBar.dataset.left === String(left)) return;
    this.olderBar.dataset.left = String(left);
    replace(this.olderBar, button(`Load ${count(Math.min(left, OLDER))} earlier`, () => this.#loadOlder(), { kind: "small", id: "load-older" }), left > OLDER && button("all", () => this.#fromStart(), { kind: "small", title: "Read from the beginning" }));
  }

  async #loadOlder() {
    const { reader } = this;
    this.olderBar.dataset.left = "";
    replace(this.olderBar, h("span", { class: "muted", text: "Loading…" }));
    try {
      const older = await reader.older(this.messages[0], OLDER);
      if (reader !== this.reader) return;
      this.#setFollow(false);
      this.messages = older.concat(this.messages);
      this.list.setCount(this.#shown.length);
      this.list.shift(-older.length);
    } catch (error) {
      toast(explain(error), "bad");
    }
    this.#state(reader);
  }

  #drawEmpty(reader) {
    const isEmpty = this.messages.length === 0 && ["live", "ended"].includes(reader.state) && !this.whole;
    this.empty.hidden = !isEmpty;
    const kind = `${reader.state} ${this.#start}`;
    if (!isEmpty || this.empty.dataset.kind === kind) return;
    this.empty.dataset.kind = kind;
    const earlier = this.total > 0;
    if (reader.state === "ended" || this.address.isInternal || earlier) {
      const text = earlier ? `Waiting for new messages; ${plural(this.total, "earlier message")} not loaded.` : reader.state === "ended" ? "The stream was closed without a message." : "No messages yet.";
      replace(this.empty, h("p", { class: "muted", text }));
      return;
    }
    const body = this.info.json ? '{"hello":"world"}' : "hello";
    const request = { method: "POST", path: this.address.path, headers: { "Content-Type": this.info.type }, body };
    replace(
      this.empty,
      h("h2", { text: "No messages yet" }),
      h("p", { class: "muted" }, "Append one with ", h("kbd", { text: "a" }), ", or from a terminal; it appears here at once."),
      [this.app.client.curl(request), `headwater append ${this.address.bucket === null ? this.address.name : this.address.path} '${body}'`].map((text) => h("code", { class: "mono block", text })),
      button("Copy", () => this.app.copyCurl(request), { symbol: "copy", kind: "small" }),
    );
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
    return messageRow(message, { mode: this.mode, words: this.filter.words, fields: this.fields, number: message.number + this.dropped });
  }

  #drawColumns() {
    columnHead(this.head, this.fields);
  }

  #chooseFields() {
    const offered = [...new Set([...this.fields, ...fieldNames(this.#shown.slice(-FIELDS_FROM))])];
    const boxes = offered.map((name) => h("label", { class: "check" }, h("input", { type: "checkbox", value: name, checked: this.fields.includes(name) }), ` ${name}`));
    const other = h("input", { class: "mono", id: "other-field", placeholder: "other field, such as user.name", spellcheck: "false", "aria-label": "Another field" });
    const body = h("div", { class: "stack" }, offered.length === 0 && h("p", { class: "muted", text: "The loaded messages have no fields." }), h("div", { class: "field-list" }, boxes), other);
    const apply = () => {
      this.fields = [...body.querySelectorAll("input:checked")].map((box) => box.value);
      if (other.value.trim()) this.fields.push(other.value.trim());
      this.columns.set(this.fields);
      this.#drawColumns();
      this.list.refresh();
    };
    body.addEventListener("change", apply);
    openDialog("Fields as columns", body);
  }

  /** Offer the messages in the list, filtered or found, as a file. */
  #download() {
    const messages = this.#shown;
    const name = this.address.name.replaceAll("/", "-");
    const choices = formats(this.info).map(([id, label, extension]) => button(label, () => {
      saveFile(`${name}.${extension}`, parts(messages, id, this.fields));
      dialog.close();
    }, { symbol: "save", id: `download-${id}`, disabled: messages.length === 0 }));
    const more = this.total > messages.length ? " Load earlier messages, or search the whole stream, for more." : "";
    const table = this.fields.length > 0 ? " CSV has the fields that are shown as columns." : "";
    const dialog = openDialog("Download", h("div", { class: "stack" }, h("p", { text: `${plural(messages.length, "message")} in the list.${more}${table}` }), h("div", { class: "row wrap" }, choices)));
  }

  #show(message) {
    if (!message) return;
    this.#setFollow(false);
    this.detail.show(message, this.mode, (offset) => this.readFrom(offset), this.filter.words);
    this.#setUrl(message.start);
  }

  /** Give the open message its own URL. */
  #setUrl(start) {
    const hash = start ? `${this.address.hash}?message=${encodeURIComponent(start)}` : this.address.hash;
    history.replaceState(null, "", hash);
  }

  #openWanted() {
    const index = this.messages.findIndex((message) => message.start === this.wanted);
    if (index < 0) return;
    this.wanted = null;
    this.list.setCount(this.#shown.length);
    this.#setFollow(false);
    this.list.select(index, true);
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

  /** Filter the loaded messages. */
  #searchNow() {
    this.whole?.stop();
    this.whole = null;
    this.filter = compile(this.search.value.trim(), this.info.json);
    this.found = this.filter.isEmpty ? null : this.messages.filter((message) => this.filter.test(message));
    this.#drawFound();
    this.#drawOlder();
  }

  /** Search the whole stream on the server. */
  #searchAll() {
    clearTimeout(this.searching);
    this.#searchNow();
    if (this.filter.isEmpty) return;
    if (!this.info.find) {
      toast("This server cannot search; the loaded messages are filtered.");
      return;
    }
    this.#setFollow(false);
    const { total } = this;
    const redraw = (search) => {
      if (search !== this.whole) return;
      this.list.setCount(search.messages.length);
      this.list.refresh();
      this.#drawFound();
    };
    this.whole = new WholeSearch(this.app.client, this.address, { ...this.info, messages: total, tail: this.reader.upToDate ? this.reader.offset : this.info.tail }, this.filter, redraw);
    redraw(this.whole);
  }

  #drawFound() {
    const { whole } = this;
    if (!whole) {
      const more = this.messages.length < (this.total ?? 0) ? "; Enter searches all" : "";
      replace(this.foundNote, this.found ? `${count(this.found.length)} found of ${count(this.messages.length)} loaded${more}` : "");
      return;
    }
    const progress = `${bytes(whole.scannedBytes)} of ${bytes(whole.totalBytes)}`;
    const texts = { running: `${count(whole.messages.length)} found in ${progress}…`, done: `${count(whole.messages.length)} found in the whole stream`, full: `the first ${count(whole.messages.length)} found, in ${progress}`, stopped: `${count(whole.messages.length)} found in ${progress}, stopped`, failed: whole.error ? explain(whole.error) : "" };
    this.foundNote.dataset.state = whole.state;
    replace(this.foundNote, h("progress", { max: String(Math.max(1, whole.totalBytes)), value: String(whole.scannedBytes), hidden: whole.state !== "running" }), texts[whole.state], whole.state === "running" && button("Stop", () => this.#stopSearch(), { kind: "small", id: "stop-search" }));
  }

  #stopSearch() {
    this.whole?.stop();
    this.#drawFound();
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
