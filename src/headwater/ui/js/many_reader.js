// Follow all streams with a prefix over one connection (docs/api.md). Browsers allow six connections to a server, so a
// page cannot open one for each stream. No message is delivered twice or omitted: each event has the offset after it, and
// every new connection names the streams with the offsets that they were read up to.

import { fromBase64 } from "./client.js";
import { isJson } from "./format.js";
import { split } from "./json.js";
import { Message } from "./messages.js";
import { EventParser } from "./sse.js";

export const FOLLOW = "/v1/stream/__ds/follow";
const RETRY_FIRST_MS = 250;
const RETRY_MAX_MS = 5000;
const SILENCE_MS = 90_000; // longer than servers keep an event stream open
const MESSAGES = ',"messages":';
const encoder = new TextEncoder();

/** States: `opening`, `live`, `paused`, `reconnecting`, `failed` (the server rejected the request), `stopped`. */
export class ManyReader {
  /** `offsets` has, by name, where to begin; streams of the prefix that are not in it are read from their beginning. */
  constructor(client, prefix, offsets, { onmessages, onstate }) {
    this.client = client;
    this.prefix = prefix;
    this.offsets = offsets;
    this.onmessages = onmessages;
    this.onstate = onstate;
    this.state = "opening";
    this.error = null;
    this.abort = null;
  }

  start() {
    this.abort = new AbortController();
    this.#run(this.abort.signal);
    return this;
  }

  /** Release the connection; `start` continues where it was. */
  pause() {
    this.abort?.abort();
    this.#setState("paused");
  }

  stop() {
    this.abort?.abort();
    this.state = "stopped";
  }

  #setState(state, error = null) {
    if (this.state === "stopped" || (state === this.state && error === this.error)) return;
    this.state = state;
    this.error = error;
    this.onstate(this);
  }

  async #run(signal) {
    let delayMs = RETRY_FIRST_MS;
    while (!signal.aborted) {
      try {
        await this.#connection(signal, () => {
          delayMs = RETRY_FIRST_MS;
          this.#setState("live");
        });
      } catch (error) {
        if (signal.aborted) return;
        const isRefused = error.status >= 400 && error.status < 500 && error.status !== 429 && error.code !== "follow_not_found";
        this.#setState(isRefused ? "failed" : "reconnecting", error);
        if (isRefused) return;
        await new Promise((resolve) => setTimeout(resolve, delayMs));
        delayMs = Math.min(delayMs * 2, RETRY_MAX_MS);
      }
    }
  }

  /** One connection's worth of events; the server ends it after a while. */
  async #connection(signal, onopen) {
    const body = JSON.stringify({ streams: Object.fromEntries(this.offsets), prefix: this.prefix });
    const session = await this.client.json({ method: "POST", path: FOLLOW, headers: { "Content-Type": "application/json" }, body, signal, quiet: true });
    // A separate controller: a silent connection is given up, not the reader.
    const own = new AbortController();
    const onabort = () => own.abort();
    signal.addEventListener("abort", onabort);
    let watch = setTimeout(onabort, SILENCE_MS);
    try {
      const response = await this.client.expect({ path: `${FOLLOW}/${session.id}`, signal: own.signal, quiet: true });
      onopen();
      const parser = new EventParser();
      const decoder = new TextDecoder();
      const pieces = response.body.getReader();
      for (;;) {
        const { done, value } = await pieces.read();
        if (done) return;
        clearTimeout(watch);
        watch = setTimeout(onabort, SILENCE_MS);
        for (const { event, data } of parser.feed(decoder.decode(value, { stream: true }))) {
          if (event === "data") this.#take(data);
          else if (event === "problem" && this.#mustRestart(JSON.parse(data))) return;
        }
      }
    } finally {
      clearTimeout(watch);
      signal.removeEventListener("abort", onabort);
      own.abort();
    }
  }

  #take(data) {
    // The messages are the last member, and a quote within a text before them is escaped.
    const at = data.indexOf(MESSAGES);
    const event = JSON.parse(at < 0 ? data : `${data.slice(0, at)}}`);
    const raw = at < 0 ? [] : split(data.slice(at + MESSAGES.length, -1));
    this.offsets.set(event.stream, event.streamNextOffset);
    const messages = raw.map((text) => toMessage(text, event));
    if (event.large) messages.push(new Message("(a large message: open the stream to read it)", null, 0));
    if (messages.length === 0) return;
    messages.at(-1).end = event.streamNextOffset;
    for (const message of messages) message.at = Date.now();
    this.onmessages(event.stream, messages);
  }

  /** Whether the streams must be named again. */
  #mustRestart({ stream, status, code, detail }) {
    if (stream === "") throw Object.assign(new Error(detail), { status, code });
    // It was deleted, or created again, or its data is no longer stored: it is read from its first message, if it comes back.
    this.offsets.set(stream, "-1");
    return code !== "stream_not_found" && code !== "stream_deleted";
  }
}

function toMessage(text, { contentType, encoding }) {
  if (isJson(contentType)) return new Message(text, null, encoder.encode(text).length);
  const content = JSON.parse(text);
  if (encoding !== "base64") return new Message(content, null, encoder.encode(content).length);
  const bytes = fromBase64(content);
  return new Message(null, bytes, bytes.length);
}
