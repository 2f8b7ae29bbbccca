// Search a whole stream on the server, one bounded request after the other (extension `find`, docs/extensions.md).

import { fromBase64 } from "./client.js";
import { Message, parseOffset } from "./messages.js";
import { firstStored } from "./position.js";

const FOUND_MAX = 1000;

export class WholeSearch {
  /** `onchange(search)` is called after each answer. Progress is in bytes of the stream. */
  constructor(client, address, info, filter, onchange) {
    this.client = client;
    this.address = address;
    this.info = info;
    this.filter = filter;
    this.onchange = onchange;
    this.messages = [];
    this.state = "running"; // done, full, stopped, failed
    this.error = null;
    const first = parseOffset(firstStored(info).offset)?.position ?? 0;
    this.totalBytes = Math.max(0, (parseOffset(info.tail)?.position ?? 0) - first);
    this.scannedBytes = 0;
    this.abort = new AbortController();
    this.#run();
  }

  stop() {
    if (this.state !== "running") return;
    this.state = "stopped";
    this.abort.abort();
  }

  async #run() {
    let offset = firstStored(this.info).offset;
    try {
      while (this.state === "running") {
        const query = { offset, until: this.info.tail, find: this.filter.needle };
        const page = await this.client.json({ path: this.address.path, query, signal: this.abort.signal, quiet: true });
        this.scannedBytes += page.scanned_bytes;
        for (const found of page.matches) this.#add(found);
        offset = page.next_offset;
        if (!page.has_more) this.state = "done";
        else if (this.messages.length >= FOUND_MAX) this.state = "full";
        this.onchange(this);
      }
    } catch (error) {
      if (this.state !== "running") return;
      this.state = "failed";
      this.error = error;
      this.onchange(this);
    }
  }

  #add(found) {
    const data = found.base64 === undefined ? null : fromBase64(found.base64);
    const message = new Message(found.text ?? null, data, found.size);
    message.index = found.position;
    message.start = found.offset;
    message.end = found.next_offset;
    message.time = found.time_ms || null;
    if (this.filter.test(message)) this.messages.push(message);
  }
}
