// Split responses into messages, each with the offset after it if known.
//
// Offsets are opaque. Only if the server supports `frames` (docs/extensions.md) is their format known, and every message
// gets its own offset. Otherwise all messages of a response share the offset after it.

import { split } from "./json.js";
import { oneLine, hexPreview } from "./format.js";

const OFFSET = /^([0-9a-f]{16})_([0-9a-f]{16})(?:_([0-9a-f]{16}))?$/;
const encoder = new TextEncoder();
const decoder = new TextDecoder();

/** Parse an offset of this server: messages and bytes before it, and the incarnation ("" if absent). Null for others. */
export function parseOffset(token) {
  const found = OFFSET.exec(token || "");
  if (found === null) return null;
  return { index: parseInt(found[1], 16), position: parseInt(found[2], 16), incarnation: found[3] ?? "" };
}

export function formatOffset(index, position, incarnation = "") {
  const place = `${index.toString(16).padStart(16, "0")}_${position.toString(16).padStart(16, "0")}`;
  return incarnation ? `${place}_${incarnation}` : place;
}

/** A short form of an offset: without leading zeros and without the incarnation. */
export function shortOffset(token) {
  const found = parseOffset(token);
  return found ? `${found.index.toString(16)}_${found.position.toString(16)}` : (token ?? "");
}

export class Message {
  constructor(text, data, size) {
    this.text = text; // JSON and text content, otherwise null
    this.data = data; // other content, otherwise null
    this.size = size;
    this.index = null; // messages before this one in the stream
    this.start = null; // the offset before it
    this.end = null; // the offset after it
    this.at = 0; // when this page received it
    this.time = null; // when the server received it, if known
    this.live = false;
    this.number = 0; // number of messages that this page has loaded before it
  }

  bytes() {
    return this.data ?? encoder.encode(this.text);
  }

  string() {
    return this.text ?? decoder.decode(this.data);
  }

  preview(mode) {
    if (mode === "hex" || (this.text === null && mode !== "text")) return hexPreview(this.bytes());
    return oneLine(this.string());
  }
}

/** The messages of a `frames=1` answer: a count, that many stored lengths, arrival times if there are any, the bytes. */
export function fromFrames(buffer, kind, next, timed = false) {
  const view = new DataView(buffer);
  const total = view.getUint32(0, true);
  const messages = [];
  let at = 4 + 4 * total + (timed ? 8 * total : 0);
  const stored = buffer.byteLength - at;
  const end = parseOffset(next);
  let index = end ? end.index - total : null;
  let position = end ? end.position - stored : null;
  for (let number = 0; number < total; number += 1) {
    const length = view.getUint32(4 + 4 * number, true);
    const data = new Uint8Array(buffer, at, kind.json ? length - 1 : length);
    const message = kind.text ? new Message(decoder.decode(data), null, data.length) : new Message(null, data, data.length);
    at += length;
    // Zero means that the time is not known.
    if (timed) message.time = Number(view.getBigUint64(4 + 4 * total + 8 * number, true)) || null;
    if (end) {
      message.index = index;
      message.start = formatOffset(index, position, end.incarnation);
      index += 1;
      position += length;
      message.end = formatOffset(index, position, end.incarnation);
    }
    messages.push(message);
  }
  return messages;
}

/** The messages of a JSON array between two offsets. With `exact`, each message gets its own offset. */
export function fromArray(text, start, next, exact) {
  const messages = split(text).map((raw) => new Message(raw, null, utf8Length(raw)));
  const end = exact ? parseOffset(next) : null;
  if (end) {
    const stored = messages.reduce((sum, message) => sum + message.size + 1, 0);
    let index = end.index - messages.length;
    let position = end.position - stored;
    const first = parseOffset(start);
    // An event stream does not distinguish CR from LF, so the byte count may not match.
    if (first === null || (first.index === Math.max(index, 0) && first.position === Math.max(position, 0))) {
      for (const message of messages) {
        message.index = index;
        message.start = formatOffset(index, position, end.incarnation);
        index += 1;
        position += message.size + 1;
        message.end = formatOffset(index, position, end.incarnation);
      }
      return messages;
    }
  }
  if (messages.length > 0) messages.at(-1).end = next;
  return messages;
}

/** Text or bytes that are one message, or several messages without boundaries. */
export function fromPiece(content, kind, start, next) {
  const isString = typeof content === "string";
  const size = isString ? utf8Length(content) : content.length;
  const text = isString ? content : kind.text ? decoder.decode(content) : null;
  const message = new Message(text, text === null ? content : null, size);
  message.start = parseOffset(start) ? start : null;
  message.index = parseOffset(start)?.index ?? null;
  message.end = next;
  return [message];
}

function utf8Length(text) {
  let length = text.length;
  for (let at = 0; at < text.length; at += 1) {
    const code = text.charCodeAt(at);
    if (code < 0x80) continue;
    length += code < 0x800 ? 1 : 2;
    if (code >= 0xd800 && code < 0xdc00) {
      // A pair is two units and four bytes.
      at += 1;
    }
  }
  return length;
}
