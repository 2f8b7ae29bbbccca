// What the page remembers between visits: the theme, the last base address, and the names of buckets and
// subscriptions that were opened (neither can be listed by the protocol). The token is never written here.

const PREFIX = "headwater.";

function read(storage, key) {
  try {
    return storage.getItem(PREFIX + key);
  } catch {
    return null; // storage may be forbidden
  }
}

function write(storage, key, value) {
  try {
    if (value === null) storage.removeItem(PREFIX + key);
    else storage.setItem(PREFIX + key, value);
  } catch {
    // Without storage the page works, and forgets.
  }
}

export const theme = {
  get: () => read(localStorage, "theme"),
  set: (value) => write(localStorage, "theme", value),
};

/** The address of another server, and its token if this tab may keep it: both end with the tab. */
export const session = {
  base: () => read(sessionStorage, "base"),
  token: () => read(sessionStorage, "token") || "",
  set(base, token, keepToken) {
    write(sessionStorage, "base", base);
    write(sessionStorage, "token", keepToken && token ? token : null);
  },
};

/** A short list of names, newest first, kept for each server. */
export class Recent {
  constructor(kind, base) {
    this.key = `${kind}.${base}`;
  }

  list() {
    try {
      const found = JSON.parse(read(localStorage, this.key) || "[]");
      return Array.isArray(found) ? found.filter((name) => typeof name === "string") : [];
    } catch {
      return [];
    }
  }

  add(name) {
    write(localStorage, this.key, JSON.stringify([name, ...this.list().filter((other) => other !== name)].slice(0, 200)));
  }

  remove(name) {
    write(localStorage, this.key, JSON.stringify(this.list().filter((other) => other !== name)));
  }
}
