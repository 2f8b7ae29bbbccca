// Properties of the visible streams, from HEAD requests, a few at a time. HEAD does not restart a TTL.

import { describe } from "./reader.js";
import { parseOffset } from "./messages.js";

const AT_ONCE = 2;
const FRESH_MS = 10_000;

export class Metadata {
  constructor(client, onchange) {
    this.client = client;
    this.onchange = onchange;
    this.known = new Map();
    this.queue = [];
    this.running = 0;
  }

  get(address) {
    return this.known.get(address.path)?.info ?? null;
  }

  /** Request these unless they are known and recent. Replaces the previous request. */
  want(addresses) {
    const now = Date.now();
    this.queue = addresses.filter((address) => now - (this.known.get(address.path)?.at ?? 0) > FRESH_MS);
    this.#pump();
  }

  put(address, info) {
    this.known.set(address.path, { info, at: Date.now() });
    if (this.known.size > 5000) this.known.delete(this.known.keys().next().value);
    this.onchange(address);
  }

  #pump() {
    while (this.running < AT_ONCE && this.queue.length > 0) {
      const address = this.queue.shift();
      this.known.set(address.path, { info: this.get(address), at: Date.now() });
      this.running += 1;
      describe(this.client, address, { quiet: true })
        .then((info) => this.put(address, info))
        .catch((error) => {
          if (error.status === 404 || error.status === 410) this.put(address, { missing: true });
        })
        .finally(() => {
          this.running -= 1;
          this.#pump();
        });
    }
  }
}

/** The size of a stream in bytes, if its offsets contain it. */
export function sizeOf(info) {
  return info?.frames ? (parseOffset(info.tail)?.position ?? null) : null;
}
