// The list of streams of a server, kept up to date: from its listing (docs/api.md), or from its registry stream.
//
// The list is sorted by name. Few changes are inserted one by one; many changes, as at the start, are sorted together.

import { Address } from "./client.js";
import { parse, plain } from "./json.js";
import { StreamReader } from "./reader.js";

export const REGISTRY = "__registry__";
export const LISTING = "/v1/stream/__ds/streams";
const RESTART_MS = 2000;
const RETRY_MAX_MS = 5000;
const PAUSE_MS = 250; // between two answers with changes, so that busy streams do not keep the page busy
const SORT_IN_MAX = 200;

/** `state` is that of a StreamReader; `streams` maps names to what is known of them. */
export class Registry {
  constructor(client, onchange) {
    this.client = client;
    this.onchange = onchange;
    this.streams = new Map();
    this.names = [];
    this.state = "opening";
    this.error = null;
    this.reader = null;
    this.abort = new AbortController();
  }

  start() {
    this.#list();
  }

  stop() {
    this.stopped = true;
    this.#close();
  }

  #close() {
    clearTimeout(this.timer);
    this.abort.abort();
    this.abort = new AbortController();
    this.reader?.stop();
    this.reader = null;
  }

  #setState(state, error = null) {
    this.state = state;
    this.error = error;
    this.onchange(this);
  }

  // -- from the listing ----------------------------------------------------------------------------------------------

  async #list() {
    const { signal } = this.abort;
    let delayMs = PAUSE_MS;
    let cursor = null;
    while (!signal.aborted) {
      try {
        if (cursor === null) cursor = await this.#listAll(signal);
        else cursor = await this.#changes(cursor, signal);
        delayMs = PAUSE_MS;
        await sleep(PAUSE_MS);
      } catch (error) {
        if (signal.aborted) return;
        if ([400, 404, 405, 501].includes(error.status)) {
          this.#openRegistry();
          return;
        }
        this.#setState(error.status >= 400 && error.status < 500 && error.status !== 429 ? "failed" : "reconnecting", error);
        await sleep(delayMs);
        delayMs = Math.min(delayMs * 2, RETRY_MAX_MS);
        cursor = null;
      }
    }
  }

  /** List everything. The cursor comes first: what changes meanwhile is then in the next answer. */
  async #listAll(signal) {
    // A retry keeps the state and the error of the last try, so that what the page shows because of them does not flicker.
    if (this.state === "opening") this.#setState("catching-up");
    const first = await this.client.json({ path: LISTING, query: { live: "long-poll", limit: 1 }, signal, quiet: true });
    const found = new Map();
    for (let after = null; ; ) {
      const page = await this.client.json({ path: LISTING, query: { after, limit: 1000 }, signal, quiet: true });
      for (const entry of page.streams) if (!isInternal(entry.name)) found.set(entry.name, described(entry));
      if (!page.has_more) break;
      after = page.next_cursor;
    }
    this.streams = found;
    this.names = [...found.keys()].sort();
    this.#setState("live");
    return first.changes_cursor;
  }

  async #changes(cursor, signal) {
    // Browsers allow six connections to a server across all tabs, so a hidden tab releases its own.
    while (document.visibilityState === "hidden" && !signal.aborted) await sleep(1000);
    const response = await this.client.expect({ path: LISTING, query: { live: "long-poll", cursor, limit: 1000 }, signal, quiet: true });
    if (response.status === 204) return cursor;
    const page = await response.json();
    if (page.reset) return null;
    const touched = new Set();
    for (const entry of page.streams) {
      if (isInternal(entry.name)) continue;
      if (entry.deleted) this.streams.delete(entry.name);
      else this.streams.set(entry.name, described(entry));
      touched.add(entry.name);
    }
    this.#changed(touched);
    if (this.state !== "live") this.#setState("live");
    return page.changes_cursor;
  }

  // -- from the registry ---------------------------------------------------------------------------------------------

  #openRegistry() {
    this.#close();
    this.fresh = true;
    this.reader = new StreamReader(this.client, new Address(REGISTRY), {
      quiet: true,
      onmessages: (messages) => this.#fold(messages),
      onstate: (reader) => this.#registryState(reader),
    }).start();
  }

  #registryState(reader) {
    if (this.stopped || (reader !== this.reader && this.reader !== null)) return;
    if (reader.state === "live" && this.fresh) {
      // An empty registry sends no message: clear the previous list.
      this.#begin();
      this.#changed([]);
    }
    if (reader.state === "failed" || reader.state === "ended") {
      // The registry does not exist, or the server has replaced it: retry from the beginning.
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.#openRegistry(), RESTART_MS);
    }
    this.#setState(reader.state, reader.error);
  }

  #begin() {
    if (!this.fresh) return;
    this.fresh = false;
    this.streams.clear();
    this.names = [];
  }

  #fold(messages) {
    this.#begin();
    const touched = new Set();
    for (const message of messages) {
      let event;
      try {
        event = plain(parse(message.text));
      } catch {
        continue;
      }
      if (event === null || typeof event !== "object" || event.type !== "stream" || typeof event.key !== "string") continue;
      const operation = event.headers?.operation;
      if (operation === "delete") this.streams.delete(event.key);
      else if (operation === "insert" || operation === "update" || operation === "upsert") {
        this.streams.set(event.key, { type: String(event.value?.contentType ?? ""), createdAt: Number(event.value?.createdAt) || null });
      } else continue;
      touched.add(event.key);
    }
    this.#changed(touched);
  }

  // -- the list ------------------------------------------------------------------------------------------------------

  #changed(touched) {
    const list = [...touched];
    if (list.length <= SORT_IN_MAX) for (const name of list) this.#insert(name);
    else this.names = [...this.streams.keys()].sort();
    this.onchange(this);
  }

  #insert(name) {
    let low = 0;
    let high = this.names.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.names[middle] < name) low = middle + 1;
      else high = middle;
    }
    const there = this.names[low] === name;
    if (this.streams.has(name)) {
      if (!there) this.names.splice(low, 0, name);
    } else if (there) this.names.splice(low, 1);
  }
}

function isInternal(name) {
  return name.startsWith("__");
}

function described(entry) {
  return {
    type: entry.content_type ?? "",
    createdAt: entry.created_at_ms || null,
    writtenAt: entry.last_write_at_ms || null,
    tail: entry.next_offset ?? null,
    closed: entry.closed === true,
    snapshot: entry.snapshot_offset || null,
    ttl: entry.ttl_secs ? String(entry.ttl_secs) : null,
    expiresAt: entry.expires_at || null,
  };
}

function sleep(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}
