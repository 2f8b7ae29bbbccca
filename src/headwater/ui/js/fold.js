// Fold events into current state: the state protocol (`headers.operation`) and session events (`operation`).
//
// set, insert, update, upsert: replace the value. append: add to the value. delete, remove: delete the entity.

import { Digits, Members } from "./json.js";

const SETS = new Set(["set", "insert", "update", "upsert"]);
const REMOVES = new Set(["delete", "remove"]);

export class Fold {
  constructor() {
    this.tables = new Map(); // type → Map(key → {value, changes, offset, at})
    this.events = 0;
    this.others = 0;
  }

  clear() {
    this.tables.clear();
  }

  /** Apply one message. Returns the changed type and key, or null. */
  apply(tree, message) {
    if (!(tree instanceof Members)) return this.#other();
    const headers = tree.get("headers");
    const control = headers instanceof Members ? headers.get("control") : undefined;
    if (typeof control === "string") {
      this.events += 1;
      if (control === "reset") this.clear();
      return null;
    }
    const operation = (headers instanceof Members && headers.get("operation")) || tree.get("operation");
    const type = tree.get("type");
    const key = asKey(tree.get("key"));
    if (typeof type !== "string" || key === null || typeof operation !== "string") return this.#other();
    let table = this.tables.get(type);
    if (REMOVES.has(operation)) {
      this.events += 1;
      table?.delete(key);
      return { type, key };
    }
    const value = tree.get("value");
    if (!SETS.has(operation) && operation !== "append") return this.#other();
    this.events += 1;
    if (!table) this.tables.set(type, (table = new Map()));
    const before = table.get(key);
    const joined = operation === "append" && before ? join(before.value, value) : value;
    table.set(key, { value: joined === undefined ? null : joined, changes: (before?.changes || 0) + 1, offset: message?.end ?? null, at: (message?.live ? message.at : message?.time) ?? 0 });
    return { type, key };
  }

  #other() {
    this.others += 1;
    return null;
  }
}

/** The result of `append`: strings and lists are concatenated, in objects their strings and lists. */
export function join(before, added) {
  if (typeof before === "string" && typeof added === "string") return before + added;
  if (Array.isArray(before)) return before.concat(Array.isArray(added) ? added : [added]);
  if (before instanceof Members && added instanceof Members) {
    const entries = before.entries.map(([key, value]) => {
      const more = added.get(key);
      if (more === undefined) return [key, value];
      return [key, typeof value === "string" && typeof more === "string" && JOINED.has(key) ? value + more : more];
    });
    for (const [key, value] of added.entries) if (before.get(key) === undefined) entries.push([key, value]);
    return new Members(entries);
  }
  return added;
}

const JOINED = new Set(["text", "content", "delta", "token", "chunk"]);

function asKey(key) {
  if (typeof key === "string") return key;
  if (key instanceof Digits) return key.text;
  return null;
}
