// Format numbers, times and bytes.

const UNITS = ["B", "KB", "MB", "GB", "TB"];

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let value = count;
  let unit = 0;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${UNITS[unit]}`;
}

export function count(number) {
  return number === null || number === undefined ? "–" : number.toLocaleString("en-US");
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function span(ms) {
  if (ms < 1) return `${ms.toFixed(2)} ms`;
  if (ms < 1000) return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
  const secs = ms / 1000;
  if (secs < 60) return `${secs < 10 ? secs.toFixed(1) : Math.round(secs)} s`;
  const mins = secs / 60;
  if (mins < 60) return `${Math.round(mins)} min`;
  const hours = mins / 60;
  return hours < 48 ? `${Math.round(hours)} h` : `${Math.round(hours / 24)} d`;
}

export function ago(atMs, nowMs = Date.now()) {
  if (!atMs) return "–";
  const ms = nowMs - atMs;
  return ms < 2000 ? "just now" : `${span(ms)} ago`;
}

export function clock(atMs) {
  const date = new Date(atMs);
  const two = (value, width = 2) => String(value).padStart(width, "0");
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}.${two(date.getMilliseconds(), 3)}`;
}

/** A time as a row shows it: the time of day today, otherwise the date as well. */
export function when(atMs, nowMs = Date.now()) {
  const date = new Date(atMs);
  if (date.toDateString() === new Date(nowMs).toDateString()) return clock(atMs);
  const two = (value) => String(value).padStart(2, "0");
  return `${date.getFullYear() % 100}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

/** A short form of a content type, for a badge. */
export function shortType(type) {
  const media = (type || "").split(";")[0].trim().toLowerCase();
  if (media === "application/json") return "json";
  if (media === "application/octet-stream") return "binary";
  if (media.startsWith("text/")) return media === "text/plain" ? "text" : media.slice(5);
  return media.replace(/^application\/(x-)?/, "") || "?";
}

export function isJson(type) {
  const media = (type || "").split(";")[0].trim().toLowerCase();
  return media === "application/json";
}

export function isText(type) {
  const media = (type || "").split(";")[0].trim().toLowerCase();
  return media.startsWith("text/") || media === "application/json";
}

/** One line of text, with visible line ends and control characters, cut to a length. */
export function oneLine(text, max = 400) {
  const cut = text.length > max ? text.slice(0, max) : text;
  // eslint-disable-next-line no-control-regex
  const visible = cut.replace(/[\u0000-\u001f\u007f\u2028\u2029\u202a-\u202e\u2066-\u2069]/g, (character) => {
    const code = character.charCodeAt(0);
    if (code === 10) return "↵";
    if (code === 9) return "→";
    if (code < 32) return String.fromCharCode(0x2400 + code);
    return "·";
  });
  return text.length > max ? `${visible}…` : visible;
}

/** The lines of a hex dump: offset, bytes, their characters. */
export function hexLines(data, perLine = 16, maxBytes = 65536) {
  const lines = [];
  const end = Math.min(data.length, maxBytes);
  for (let at = 0; at < end; at += perLine) {
    const row = data.subarray(at, Math.min(at + perLine, end));
    let hex = "";
    let chars = "";
    for (let index = 0; index < perLine; index += 1) {
      if (index === 8) hex += " ";
      if (index < row.length) {
        hex += `${row[index].toString(16).padStart(2, "0")} `;
        chars += row[index] >= 32 && row[index] < 127 ? String.fromCharCode(row[index]) : ".";
      } else hex += "   ";
    }
    lines.push(`${at.toString(16).padStart(8, "0")}  ${hex} ${chars}`);
  }
  if (data.length > end) lines.push(`… ${count(data.length - end)} more bytes`);
  return lines;
}

/** The first bytes on one line: hex, and their characters beside it. */
export function hexPreview(data, max = 16) {
  const first = Array.from(data.subarray(0, max));
  const hex = first.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
  const chars = first.map((byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : ".")).join("");
  return `${hex}${data.length > max ? " …" : ""}  ${chars}`;
}
