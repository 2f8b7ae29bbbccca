// Messages as a file: JSON lines or lines of text, a table for spreadsheets, or the bytes as they are stored.

import { field, fieldText } from "./filter.js";

const FORMULA = /^[=+@\t\r]|^-(?![\d.])/; // a spreadsheet would calculate these

/** The formats that suit the content of a stream: `[id, label, file extension]`. */
export function formats(kind) {
  if (kind.json) return [["lines", "JSON lines", "jsonl"], ["table", "CSV", "csv"]];
  if (kind.text) return [["text", "Text, each message followed by a line break", "txt"], ["table", "CSV", "csv"]];
  return [["bytes", "Bytes, one message after the other", "bin"]];
}

/** The parts of a file with these messages. The table has the chosen fields as columns, or the whole message. */
export function parts(messages, format, fields) {
  if (format === "bytes") return messages.map((message) => message.bytes());
  if (format === "text") return messages.flatMap((message) => [message.bytes(), "\n"]);
  // A line break in JSON is white space between its parts.
  if (format === "lines") return messages.flatMap((message) => [message.string().replace(/[\r\n]+/g, " "), "\n"]);
  const rows = messages.map((message) => [String(message.index ?? message.number), message.start ?? "", received(message), ...columns(message, fields)]);
  const head = ["number", "offset", "received", ...(fields.length > 0 ? fields : ["message"])];
  return [head, ...rows].map((row) => `${row.map(cell).join(",")}\r\n`);
}

function received(message) {
  const time = message.live ? message.at : message.time;
  return time ? new Date(time).toISOString() : "";
}

function columns(message, fields) {
  if (fields.length === 0) return [message.string()];
  let value;
  try {
    value = JSON.parse(message.string());
  } catch {
    value = undefined;
  }
  return fields.map((name) => fieldText(field(value, name.split("."))));
}

function cell(text) {
  const safe = FORMULA.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
