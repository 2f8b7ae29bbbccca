// The list of streams, folded live from the server's registry stream.
//
// The list is sorted. Few changes are inserted one by one; many changes, as at the start, are sorted together.

import { Address } from "./client.js";
import { parse, plain } from "./json.js";
import { StreamReader } from "./reader.js";

export const REGISTRY = "__registry__";
const RESTART_MS = 2000;
const SORT_IN_MAX = 200;

export class Registry {
  constructor(client, onchange) {
    this.client = client;
    this.onchange = onchange;
    this.streams = new Map();
    this.names = [];
    this.state = "opening";
    this.error = null;
    this.reader = null;
  }

  start() {
    this.#open();
  }

  stop() {
    clearTimeout(this.timer);
    this.reader?.stop();
    this.reader = null;
  }

  #open() {
    this.stop();
    this.fresh = true;
    this.reader = new StreamReader(this.client, new Address(REGISTRY), {
      quiet: true,
      onmessages: (messages) => this.#fold(messages),
      onstate: (reader) => this.#state(reader),
    }).start();
  }

  #state(reader) {
    if (reader !== this.reader && this.reader !== null) return;
    this.state = reader.state;
    this.error = reader.error;
    if (reader.state === "live" && this.fresh) {
      // An empty registry sends no message: clear the previous list.
      this.#begin();
      this.#changed([]);
    }
    if (reader.state === "failed" || reader.state === "ended") {
      // The registry does not exist, or the server has replaced it: retry from the beginning.
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.#open(), RESTART_MS);
    }
    this.onchange(this);
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
