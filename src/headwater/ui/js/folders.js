// The rows of the list of streams: flat or as folders, in the chosen order.

export const ORDERS = [
  ["name", "by name"],
  ["newest", "newest first"],
  ["written", "last written first"],
];

/** Names in an order other than by name; names without a time come last. */
export function ordered(names, streams, order) {
  if (order === "name") return names;
  const key = order === "newest" ? "createdAt" : "writtenAt";
  return [...names].sort((a, b) => (streams.get(b)?.[key] ?? 0) - (streams.get(a)?.[key] ?? 0));
}

/**
 * Rows for a list of names: `{ name, depth }` for a stream, `{ folder, depth, count, isOpen }` for a folder. Folders
 * stand where their first stream would be.
 */
export function folderRows(names, open) {
  const root = folder("", 0);
  for (const name of names) {
    let at = root;
    for (let slash = name.indexOf("/"); slash >= 0; slash = name.indexOf("/", slash + 1)) {
      const path = name.slice(0, slash + 1);
      let child = at.folders.get(path);
      if (!child) {
        child = folder(path, at.depth + 1);
        at.folders.set(path, child);
        at.children.push(child);
      }
      child.count += 1;
      at = child;
    }
    at.children.push(name);
  }
  const rows = [];
  const add = (at) => {
    for (const child of at.children) {
      if (typeof child === "string") rows.push({ name: child, depth: at.depth });
      else {
        const isOpen = open.has(child.path);
        rows.push({ folder: child.path, depth: at.depth, count: child.count, isOpen });
        if (isOpen) add(child);
      }
    }
  };
  add(root);
  return rows;
}

function folder(path, depth) {
  return { path, depth, count: 0, children: [], folders: new Map() };
}
