// The filter language of the message list: words, and conditions on fields of JSON messages.
//
//   bakery            the text contains the word; upper and lower case are equal
//   "two words"       a phrase
//   user.name=ann     a field has this value;  !=  >  >=  <  <=  compare,  ~  contains

const TOKEN = /([^\s"=!<>~]+)(!=|>=|<=|=|>|<|~)(?:"([^"]*)"|([^\s"]*))|"([^"]*)"|(\S+)/g;

/** Compile a filter. `needle` is a text that every match contains, for a search on the server. */
export function compile(text, json) {
  const words = [];
  const conditions = [];
  for (const [whole, path, operator, quoted, bare, phrase, word] of text.matchAll(TOKEN)) {
    if (path !== undefined && json) conditions.push({ path: path.split("."), operator, value: quoted ?? bare });
    else words.push((phrase ?? word ?? whole).toLowerCase());
  }
  const marks = [...words, ...conditions.filter(({ operator }) => operator === "=" || operator === "~").map(({ value }) => value.toLowerCase())].filter(Boolean);
  return {
    isEmpty: words.length + conditions.length === 0,
    words: marks,
    needle: marks.reduce((longest, mark) => (mark.length > longest.length ? mark : longest), "") || (conditions[0]?.path.at(-1) ?? ""),
    test(message) {
      const content = message.string();
      const lower = words.length > 0 ? content.toLowerCase() : "";
      if (!words.every((word) => lower.includes(word))) return false;
      if (conditions.length === 0) return true;
      const value = parsed(content);
      return conditions.every((condition) => holds(field(value, condition.path), condition));
    },
  };
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** The value at a path, undefined if there is none. */
export function field(value, path) {
  let found = value;
  for (const name of path) {
    if (found === null || typeof found !== "object" || !Object.hasOwn(found, name)) return undefined;
    found = found[name];
  }
  return found;
}

export function fieldText(value) {
  if (value === undefined) return "";
  return typeof value === "string" ? value : JSON.stringify(value);
}

function holds(found, { operator, value }) {
  const text = fieldText(found);
  if (operator === "=") return found !== undefined && text.toLowerCase() === value.toLowerCase();
  if (operator === "!=") return text.toLowerCase() !== value.toLowerCase();
  if (operator === "~") return text.toLowerCase().includes(value.toLowerCase());
  if (found === undefined || value === "") return false;
  const numbers = text.trim() !== "" && !Number.isNaN(Number(text)) && !Number.isNaN(Number(value));
  const order = numbers ? Number(text) - Number(value) : text < value ? -1 : text > value ? 1 : 0;
  return { ">": order > 0, ">=": order >= 0, "<": order < 0, "<=": order <= 0 }[operator];
}

/** Names of the fields of JSON messages, the most frequent first: of the first level, and of objects in it. */
export function fieldNames(messages, max = 60) {
  const seen = new Map();
  for (const message of messages) {
    const value = parsed(message.string());
    if (value === null || typeof value !== "object" || Array.isArray(value)) continue;
    for (const [name, child] of Object.entries(value)) {
      if (name.includes(".") || name === "") continue;
      seen.set(name, (seen.get(name) ?? 0) + 1);
      if (child === null || typeof child !== "object" || Array.isArray(child)) continue;
      for (const inner of Object.keys(child)) if (!inner.includes(".")) seen.set(`${name}.${inner}`, (seen.get(`${name}.${inner}`) ?? 0) + 1);
    }
  }
  return [...seen].sort((a, b) => b[1] - a[1]).slice(0, max).map(([name]) => name);
}
