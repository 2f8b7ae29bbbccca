// Delivery time of live messages. It is known for messages that this page appended, and for messages that contain a
// timestamp; it is not estimated for others.

import { split } from "./json.js";

const KEPT_MS = 60_000;
const KEPT_MAX = 1000;
const BELIEVED_MS = 60_000;
const TIME = /"(?:timestamp|ts|time|at|sent_at|sentAt|created_at|createdAt|emitted_at|emittedAt)"\s*:\s*(?:"([^"\\]{10,40})"|([0-9]{10,19}(?:\.[0-9]+)?))/;

export class Delays {
  #sent = new Map();

  /** Remember the messages of an append. */
  appended(path, body, json) {
    if (typeof body !== "string") return;
    const now = performance.now();
    let pieces = [body];
    if (json) {
      try {
        pieces = split(body);
      } catch {
        // A single value, not an array.
      }
    }
    for (const piece of pieces) this.#sent.set(`${path}\n${piece.trim()}`, now);
    for (const key of this.#sent.keys()) {
      if (this.#sent.size <= KEPT_MAX) break;
      this.#sent.delete(key);
    }
  }

  /** Delivery time in milliseconds, or null. */
  of(path, message) {
    if (!message.live || message.text === null) return null;
    const key = `${path}\n${message.text.trim()}`;
    const sentAt = this.#sent.get(key);
    if (sentAt !== undefined) {
      this.#sent.delete(key);
      const ms = performance.now() - sentAt;
      if (ms < KEPT_MS) return ms;
    }
    const found = TIME.exec(message.text.length > 4000 ? message.text.slice(0, 4000) : message.text);
    if (found === null) return null;
    const madeAt = found[1] !== undefined ? Date.parse(found[1]) : scaled(found[2]);
    const ms = message.at - madeAt;
    // Clocks differ slightly: treat a small negative time as zero.
    return ms > -50 && ms < BELIEVED_MS ? Math.max(0, ms) : null;
  }
}

/** Seconds, milli-, micro- or nanoseconds since 1970, recognized by the number of digits. */
function scaled(text) {
  const digits = text.split(".")[0].length;
  return Number(text) * (digits <= 10 ? 1e3 : digits <= 13 ? 1 : digits <= 16 ? 1e-3 : 1e-6);
}
