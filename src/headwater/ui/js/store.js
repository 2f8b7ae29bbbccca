// What the page stores between visits: the theme, the last server URL, and the names of opened buckets and subscriptions
// (the protocol cannot list them). The token is not stored here.

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
    // The page also works without storage.
  }
}

export const theme = {
  get: () => read(localStorage, "theme"),
  set: (value) => write(localStorage, "theme", value),
};

/** The URL of another server and, on request, its token, until the tab is closed. */
export const session = {
  base: () => read(sessionStorage, "base"),
  token: () => read(sessionStorage, "token") || "",
  set(base, token, keepToken) {
    write(sessionStorage, "base", base);
    write(sessionStorage, "token", keepToken && token ? token : null);
  },
};

/** A short list of names for each server, newest first. */
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

/** The fields of a stream that are shown as columns. */
export class Columns {
  constructor(base, path) {
    this.key = `columns.${base}${path}`;
  }

  get() {
    try {
      const found = JSON.parse(read(localStorage, this.key) || "[]");
      return Array.isArray(found) ? found.filter((name) => typeof name === "string").slice(0, 12) : [];
    } catch {
      return [];
    }
  }

  set(names) {
    write(localStorage, this.key, names.length === 0 ? null : JSON.stringify(names));
  }
}

/** How the list of streams is shown: flat or as folders, and its order. */
export const listing = {
  get: () => ({ folders: read(localStorage, "list.folders") === "yes", order: read(localStorage, "list.order") || "name" }),
  set({ folders, order }) {
    write(localStorage, "list.folders", folders ? "yes" : null);
    write(localStorage, "list.order", order === "name" ? null : order);
  },
};
