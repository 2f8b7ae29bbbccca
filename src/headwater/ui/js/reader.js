// Read a stream: pages up to the tail, then live. No message is delivered twice or omitted: a message is delivered
// together with the offset after it, and every reconnect starts at the last delivered offset.

import { Refused, fromBase64, refusal } from "./client.js";
import { isJson, isText } from "./format.js";
import { fromArray, fromFrames, fromPiece } from "./messages.js";
import { firstStored, offsetBefore } from "./position.js";
import { EventParser } from "./sse.js";

const RETRY_FIRST_MS = 250;
const RETRY_MAX_MS = 5000;
const FIRST_EVENT_MS = 6000; // the server sends a first event immediately; a buffering proxy holds it back
const SILENCE_MS = 90_000; // longer than servers keep an event stream open
const LAST = /^last:([0-9]+)$/;
const SINCE = /^since:(.+)$/;
const HIDDEN_MS = 20_000; // browsers allow six connections to a server across all tabs, so a hidden tab releases its own

/** The properties of a stream, from a HEAD request. */
export async function describe(client, address, options = {}) {
  const response = await client.expect({ method: "HEAD", path: address.path, ...options });
  const get = (name) => response.headers.get(name);
  const extensions = (get("stream-extensions") || "").split(",").map((name) => name.trim());
  const type = get("content-type") || "";
  const position = get("stream-next-position");
  return {
    type,
    json: isJson(type),
    text: isText(type),
    tail: get("stream-next-offset"),
    closed: get("stream-closed") === "true",
    ttl: get("stream-ttl"),
    expiresAt: get("stream-expires-at"),
    messages: position === null ? null : Number(position),
    frames: extensions.includes("frames"),
    times: extensions.includes("times"),
    find: extensions.includes("find"),
    earliest: get("stream-earliest-offset"),
    snapshot: get("stream-snapshot-offset"),
    writtenAt: Date.parse(get("stream-last-write-at") || "") || null,
    headers: [...response.headers],
  };
}

/**
 * States: `opening`, `catching-up`, `held` (the page limit is reached), `live`, `paused`, `reconnecting`, `ended`
 * (the stream is closed and read to its end), `failed` (the server rejected the request), `stopped`.
 */
export class StreamReader {
  constructor(client, address, { from = "-1", mode = "auto", limit = Infinity, onmessages, onstate, quiet = false }) {
    this.client = client;
    this.address = address;
    this.mode = mode;
    this.limit = limit;
    this.onmessages = onmessages;
    this.onstate = onstate || (() => {});
    this.quiet = quiet;
    this.offset = from;
    this.kind = null;
    this.state = "opening";
    this.transport = null;
    this.error = null;
    this.reconnects = 0;
    this.loaded = 0;
    this.cursor = null;
    this.upToDate = false;
    this.wanted = "run";
    this.abort = new AbortController();
    this.wake = () => {};
    this.onvisibility = () => this.#visibility();
  }

  start() {
    document.addEventListener("visibilitychange", this.onvisibility);
    this.#run();
    return this;
  }

  stop() {
    document.removeEventListener("visibilitychange", this.onvisibility);
    clearTimeout(this.hiding);
    this.#want("stop");
  }

  pause() {
    this.#want("pause");
  }

  resume() {
    this.#want("run");
  }

  /** Continue after the page limit. */
  more(count) {
    this.limit = this.loaded + count;
    this.wake();
  }

  /** Skip to the tail. */
  skip() {
    this.offset = "now";
    this.upToDate = false;
    this.limit = Infinity;
    this.#interrupt();
  }

  use(mode) {
    this.mode = mode;
    this.#interrupt();
  }

  #want(what) {
    if (this.wanted === "stop") return;
    this.wanted = what;
    this.#interrupt();
  }

  #interrupt() {
    this.abort.abort();
    this.abort = new AbortController();
    this.wake();
  }

  #visibility() {
    clearTimeout(this.hiding);
    if (document.visibilityState === "hidden") {
      this.hiding = setTimeout(() => {
        this.hidden = true;
        this.#interrupt();
      }, HIDDEN_MS);
    } else if (this.hidden) {
      this.hidden = false;
      this.#interrupt();
    }
  }

  #setState(state, error = null) {
    if (state === this.state && error === this.error && this.transport === this.reportedTransport) return;
    this.state = state;
    this.error = error;
    this.reportedTransport = this.transport;
    this.onstate(this);
  }

  #deliver(messages, live) {
    const now = Date.now();
    for (const message of messages) {
      message.at = now;
      message.live = live;
    }
    this.loaded += messages.length;
    if (messages.length > 0) this.onmessages(messages, this);
  }

  #sleep(ms) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  async #run() {
    let retryMs = RETRY_FIRST_MS;
    while (this.wanted !== "stop") {
      if (this.wanted === "pause" || this.hidden) {
        this.#setState("paused");
        await this.#sleep(3_600_000);
        continue;
      }
      if (!this.upToDate && this.loaded >= this.limit) {
        this.#setState("held");
        await this.#sleep(3_600_000);
        continue;
      }
      const { signal } = this.abort;
      try {
        if (this.kind === null) this.kind = await describe(this.client, this.address, { signal, quiet: this.quiet });
        if (LAST.test(this.offset)) await this.#locate(signal);
        else if (SINCE.test(this.offset)) await this.#locateTime(signal);
        const ended = this.upToDate ? await this.#live(signal) : await this.#page(signal);
        retryMs = RETRY_FIRST_MS;
        if (ended) {
          this.#setState("ended");
          return;
        }
      } catch (error) {
        if (signal.aborted) continue;
        if (error instanceof Refused && error.status < 500 && error.status !== 429 && error.status !== 408) {
          this.#setState("failed", error);
          return;
        }
        this.reconnects += 1;
        this.#setState("reconnecting", error);
        await this.#sleep(retryMs * (0.8 + 0.4 * Math.random()));
        retryMs = Math.min(retryMs * 2, RETRY_MAX_MS);
        // The stream may have been deleted or replaced in the meantime.
        if (this.wanted === "run") this.kind = null;
      }
    }
    this.#setState("stopped");
  }

  /** Replace "last:N" by the offset where the last N messages begin. Servers that do not number them are read whole. */
  async #locate(signal) {
    const { kind, address } = this;
    const first = firstStored(kind);
    const wanted = (kind.messages ?? 0) - Number(LAST.exec(this.offset)[1]);
    if (!kind.frames || wanted <= first.index) {
      this.offset = first.offset;
      return;
    }
    this.offset = await offsetBefore(this.client, address, { start: first.offset, end: kind.tail, index: wanted, signal });
    this.firstIndex = wanted;
  }

  /** Replace "since:TIME" by the offset of the first message that arrived at that time or later. */
  async #locateTime(signal) {
    const since = SINCE.exec(this.offset)[1];
    const response = await this.client.expect({ method: "HEAD", path: this.address.path, query: { since }, signal, quiet: this.quiet });
    this.offset = response.headers.get("stream-since-offset") ?? firstStored(this.kind).offset;
  }

  get #frames() {
    return this.kind.times ? { frames: "1", times: "1" } : { frames: "1" };
  }

  /** The messages before the first loaded one: `count` of them, or as many as are stored. */
  async older(first, count) {
    const stored = firstStored(this.kind);
    const index = Math.max(stored.index, first.index - count);
    let offset = await offsetBefore(this.client, this.address, { start: stored.offset, end: first.start, index });
    const messages = [];
    while (offset !== first.start) {
      const response = await this.client.expect({ path: this.address.path, query: { offset, until: first.start, ...this.#frames }, quiet: this.quiet });
      const body = await response.arrayBuffer();
      const next = response.headers.get("stream-next-offset");
      for (const message of fromFrames(body, this.kind, next, this.kind.times)) if (message.index >= index) messages.push(message);
      if (next === offset) break;
      offset = next;
    }
    return messages;
  }

  /** Read one page. Returns true at the end of a closed stream. */
  async #page(signal) {
    this.#setState("catching-up");
    const { kind, address } = this;
    const from = this.offset;
    const framed = kind.frames && from !== "now";
    const query = framed ? { offset: from, ...this.#frames } : { offset: from };
    const response = await this.client.expect({ path: address.path, query, signal, quiet: this.quiet });
    const body = await response.arrayBuffer();
    const next = response.headers.get("stream-next-offset");
    const messages = from === "now" || body.byteLength === 0 ? [] : framed ? fromFrames(body, kind, next, kind.times) : this.#decode(body, from, next);
    const closed = response.headers.get("stream-closed") === "true";
    this.offset = next;
    this.upToDate = response.headers.get("stream-up-to-date") === "true" || from === "now";
    this.#deliver(this.firstIndex ? messages.filter((message) => message.index === null || message.index >= this.firstIndex) : messages, false);
    return closed && this.upToDate;
  }

  #decode(body, from, next) {
    if (this.kind.json) return fromArray(new TextDecoder().decode(body), from, next, this.kind.frames);
    return fromPiece(new Uint8Array(body), this.kind, from, next);
  }

  async #live(signal) {
    const transport = this.mode === "auto" ? (this.buffered ? "long-poll" : "sse") : this.mode;
    this.transport = transport;
    return transport === "sse" ? this.#events(signal) : this.#poll(signal);
  }

  async #poll(signal) {
    const from = this.offset;
    const query = { offset: from, live: "long-poll", cursor: this.cursor };
    this.#setState("live");
    const response = await this.client.expect({ path: this.address.path, query, signal, quiet: true });
    const body = await response.arrayBuffer();
    const closed = response.headers.get("stream-closed") === "true";
    this.cursor = response.headers.get("stream-cursor");
    if (response.status === 204 || body.byteLength === 0) return closed;
    if (this.kind.frames && !this.kind.json) {
      // The response has no message boundaries, so read the page again with frames.
      this.upToDate = false;
      return false;
    }
    const next = response.headers.get("stream-next-offset");
    const messages = this.#decode(body, from, next);
    this.offset = next;
    this.upToDate = response.headers.get("stream-up-to-date") === "true";
    this.#deliver(messages, true);
    return closed && this.upToDate;
  }

  async #events(signal) {
    const query = { offset: this.offset, live: "sse", cursor: this.cursor };
    // A separate controller: a timeout ends this response, not the reader.
    const own = new AbortController();
    const onabort = () => own.abort();
    signal.addEventListener("abort", onabort);
    let watch = setTimeout(() => own.abort(), FIRST_EVENT_MS * 2);
    let opened = false;
    let spoke = false;
    try {
      const response = await this.client.send({ path: this.address.path, query, signal: own.signal, quiet: true });
      if (!response.ok) throw await refusal(response);
      if (!(response.headers.get("content-type") || "").startsWith("text/event-stream")) {
        this.buffered = true;
        return false;
      }
      opened = true;
      const encoded = response.headers.get("stream-sse-data-encoding") === "base64";
      const parser = new EventParser();
      const decoder = new TextDecoder();
      const body = response.body.getReader();
      clearTimeout(watch);
      watch = setTimeout(() => own.abort(), FIRST_EVENT_MS);
      let pending = [];
      for (;;) {
        const { done, value } = await body.read();
        if (done) return false;
        clearTimeout(watch);
        watch = setTimeout(() => own.abort(), SILENCE_MS);
        const ready = [];
        let ended = false;
        for (const { event, data } of parser.feed(decoder.decode(value, { stream: true }))) {
          spoke = true;
          if (event === "data") pending.push(data);
          else if (event === "control") {
            const control = JSON.parse(data);
            this.#completeEvents(pending, encoded, control, ready);
            pending = [];
            if (control.streamClosed) ended = true;
          }
        }
        if (spoke) this.#setState("live");
        this.#deliver(ready, true);
        if (ended) return true;
      }
    } catch (error) {
      if (!signal.aborted && own.signal.aborted && !spoke && this.mode === "auto") {
        // No event arrived, or a proxy buffers the response: use long-polling, which cannot be buffered.
        this.buffered = opened || this.buffered;
        if (this.buffered) return false;
      }
      throw error;
    } finally {
      clearTimeout(watch);
      signal.removeEventListener("abort", onabort);
      own.abort();
    }
  }

  /** Complete the data events before a control event with its offset. */
  #completeEvents(pending, encoded, control, ready) {
    const next = control.streamNextOffset;
    let from = this.offset;
    pending.forEach((data, at) => {
      const isLast = at === pending.length - 1;
      const end = isLast ? next : null;
      if (this.kind.json) ready.push(...fromArray(data, from, end, this.kind.frames && isLast));
      else ready.push(...fromPiece(encoded ? fromBase64(data) : data, this.kind, from, end));
      from = null;
    });
    if (next) this.offset = next;
    if (control.streamCursor) this.cursor = control.streamCursor;
  }
}
