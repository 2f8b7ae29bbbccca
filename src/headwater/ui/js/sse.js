// Parse an event stream (HTML standard, §9.2) from chunks of text. Lines end with CR, LF or CRLF, at any chunk boundary.

export class EventParser {
  #rest = "";
  #data = [];
  #event = "";
  #skipLineFeed = false;

  /** Return the events that this chunk completes. */
  feed(chunk) {
    let text = chunk;
    if (this.#skipLineFeed && text.length > 0) {
      if (text[0] === "\n") text = text.slice(1);
      this.#skipLineFeed = false;
    }
    const events = [];
    const all = this.#rest + text;
    let start = 0;
    // Only new text can contain a line end.
    let at = this.#rest.length;
    for (; at < all.length; at += 1) {
      const code = all.charCodeAt(at);
      if (code !== 10 && code !== 13) continue;
      const event = this.#line(all.slice(start, at));
      if (event) events.push(event);
      if (code === 13) {
        if (at + 1 === all.length) this.#skipLineFeed = true;
        else if (all.charCodeAt(at + 1) === 10) at += 1;
      }
      start = at + 1;
    }
    this.#rest = all.slice(start);
    return events;
  }

  #line(line) {
    if (line === "") {
      if (this.#data.length === 0) {
        this.#event = "";
        return null;
      }
      const event = { event: this.#event || "message", data: this.#data.join("\n") };
      this.#data = [];
      this.#event = "";
      return event;
    }
    const colon = line.indexOf(":");
    if (colon === 0) return null;
    const name = colon < 0 ? line : line.slice(0, colon);
    let value = colon < 0 ? "" : line.slice(colon + 1);
    if (value.startsWith(" ")) value = value.slice(1);
    if (name === "data") this.#data.push(value);
    else if (name === "event") this.#event = value;
    return null;
  }
}
