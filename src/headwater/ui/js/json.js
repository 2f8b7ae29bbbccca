// Lossless JSON: `split` cuts an array into its elements as written; `parse` returns a tree that preserves the digits of
// numbers, the order of keys, and repeated keys. JSON.parse preserves none of these.

/** A number as written. */
export class Digits {
  constructor(text) {
    this.text = text;
  }

  toString() {
    return this.text;
  }
}

/** An object as written: a list of [key, value]. */
export class Members {
  constructor(entries) {
    this.entries = entries;
  }

  get(key) {
    for (let at = this.entries.length - 1; at >= 0; at -= 1) if (this.entries[at][0] === key) return this.entries[at][1];
    return undefined;
  }
}

/** The elements of a JSON array, each exactly as written, including surrounding blanks. */
export function split(text) {
  let start = 0;
  while (start < text.length && isBlank(text.charCodeAt(start))) start += 1;
  let end = text.length;
  while (end > start && isBlank(text.charCodeAt(end - 1))) end -= 1;
  if (text[start] !== "[" || text[end - 1] !== "]" || end - start < 2) throw new SyntaxError("not a JSON array");
  const elements = [];
  let depth = 0;
  let from = start + 1;
  const last = end - 1;
  for (let at = from; at < last; at += 1) {
    switch (text.charCodeAt(at)) {
      case 34: // a string: on to its closing quote
        for (at += 1; at < last; at += 1) {
          const code = text.charCodeAt(at);
          if (code === 92) at += 1;
          else if (code === 34) break;
        }
        break;
      case 91:
      case 123:
        depth += 1;
        break;
      case 93:
      case 125:
        depth -= 1;
        break;
      case 44:
        if (depth === 0) {
          elements.push(text.slice(from, at));
          from = at + 1;
        }
        break;
      default:
    }
  }
  const rest = text.slice(from, last);
  if (elements.length > 0 || rest.trim() !== "") elements.push(rest);
  return elements;
}

/** The tree of a JSON text: `Members`, arrays, strings, `Digits`, true, false, null. */
export function parse(text) {
  const reader = new Reader(text);
  const value = reader.value(0);
  reader.blanks();
  if (reader.at !== text.length) throw new SyntaxError("text after the JSON value");
  return value;
}

/** The tree as ordinary values; large integers stay strings of digits. */
export function plain(tree) {
  if (tree instanceof Digits) {
    const number = Number(tree.text);
    return Number.isInteger(number) && !Number.isSafeInteger(number) ? tree.text : number;
  }
  if (tree instanceof Members) {
    const object = Object.create(null);
    for (const [key, value] of tree.entries) object[key] = plain(value);
    return object;
  }
  return Array.isArray(tree) ? tree.map(plain) : tree;
}

/** A tree in one line. */
export function print(tree) {
  if (tree instanceof Digits) return tree.text;
  if (tree instanceof Members) return `{${tree.entries.map(([key, value]) => `${JSON.stringify(key)}:${print(value)}`).join(",")}}`;
  if (Array.isArray(tree)) return `[${tree.map(print).join(",")}]`;
  return JSON.stringify(tree);
}

/** A tree over several lines. */
export function pretty(tree, indent = "") {
  const deeper = `${indent}  `;
  if (tree instanceof Members && tree.entries.length > 0) {
    return `{\n${tree.entries.map(([key, value]) => `${deeper}${JSON.stringify(key)}: ${pretty(value, deeper)}`).join(",\n")}\n${indent}}`;
  }
  if (Array.isArray(tree) && tree.length > 0) {
    return `[\n${tree.map((value) => deeper + pretty(value, deeper)).join(",\n")}\n${indent}]`;
  }
  return print(tree);
}

const DEPTH_MAX = 500;

function isBlank(code) {
  return code === 32 || code === 10 || code === 13 || code === 9;
}

class Reader {
  constructor(text) {
    this.text = text;
    this.at = 0;
  }

  blanks() {
    while (isBlank(this.text.charCodeAt(this.at))) this.at += 1;
  }

  value(depth) {
    if (depth > DEPTH_MAX) throw new SyntaxError("nested too deep to show");
    this.blanks();
    switch (this.text[this.at]) {
      case "{":
        return this.object(depth);
      case "[":
        return this.array(depth);
      case '"':
        return this.string();
      case "t":
        return this.word("true", true);
      case "f":
        return this.word("false", false);
      case "n":
        return this.word("null", null);
      default:
        return this.number();
    }
  }

  object(depth) {
    const entries = [];
    this.at += 1;
    this.blanks();
    if (this.text[this.at] === "}") {
      this.at += 1;
      return new Members(entries);
    }
    for (;;) {
      this.blanks();
      const key = this.string();
      this.blanks();
      this.take(":");
      entries.push([key, this.value(depth + 1)]);
      this.blanks();
      if (this.text[this.at] === "}") break;
      this.take(",");
    }
    this.at += 1;
    return new Members(entries);
  }

  array(depth) {
    const values = [];
    this.at += 1;
    this.blanks();
    if (this.text[this.at] === "]") {
      this.at += 1;
      return values;
    }
    for (;;) {
      values.push(this.value(depth + 1));
      this.blanks();
      if (this.text[this.at] === "]") break;
      this.take(",");
    }
    this.at += 1;
    return values;
  }

  string() {
    const start = this.at;
    if (this.text[start] !== '"') throw new SyntaxError("a string was expected");
    for (this.at += 1; this.at < this.text.length; this.at += 1) {
      const code = this.text.charCodeAt(this.at);
      if (code === 92) this.at += 1;
      else if (code === 34) {
        this.at += 1;
        return JSON.parse(this.text.slice(start, this.at));
      }
    }
    throw new SyntaxError("a string has no end");
  }

  number() {
    const found = /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/y;
    found.lastIndex = this.at;
    const match = found.exec(this.text);
    if (match === null) throw new SyntaxError("a value was expected");
    this.at += match[0].length;
    return new Digits(match[0]);
  }

  word(text, value) {
    if (!this.text.startsWith(text, this.at)) throw new SyntaxError("a value was expected");
    this.at += text.length;
    return value;
  }

  take(character) {
    if (this.text[this.at] !== character) throw new SyntaxError(`${character} was expected`);
    this.at += 1;
  }
}
