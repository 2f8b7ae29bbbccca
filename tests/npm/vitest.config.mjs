// Runs test files that live beside their Python drivers, outside of tests/npm, with the packages pinned in tests/npm.

import { fileURLToPath } from "node:url"
import { defineConfig } from "vitest/config"

const at = (path) => fileURLToPath(new URL(path, import.meta.url))
const installed = (name, entry = "dist/index.js") => at(`./node_modules/${name}/${entry}`)

export default defineConfig({
  root: at(".."),
  cacheDir: at("./node_modules/.vite"),
  resolve: {
    alias: {
      "@durable-streams/client": installed("@durable-streams/client"),
      "@durable-streams/server-conformance-tests": installed("@durable-streams/server-conformance-tests"),
      "@durable-streams/state/db": installed("@durable-streams/state", "dist/db.js"),
      "@durable-streams/state": installed("@durable-streams/state"),
      vitest: installed("vitest"),
    },
  },
  test: {
    include: ["conformance/**/*.test.mjs", "clients/**/*.test.mjs"],
    // Groups that the suite itself marks as concurrent only sleep; the others stay one after another, because
    // stream names in the suite are only unique per millisecond.
    maxConcurrency: 32,
    fileParallelism: false,
    testTimeout: 60_000,
  },
})
