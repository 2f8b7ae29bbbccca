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
      "@durable-streams/aisdk-transport": installed("@durable-streams/aisdk-transport"),
      "@durable-streams/tanstack-ai-transport": installed("@durable-streams/tanstack-ai-transport"),
      "@durable-streams/y-durable-streams/server": installed("@durable-streams/y-durable-streams", "dist/server/index.js"),
      "@durable-streams/y-durable-streams": installed("@durable-streams/y-durable-streams"),
      "@durable-streams/client": installed("@durable-streams/client"),
      "@durable-streams/server-conformance-tests": installed("@durable-streams/server-conformance-tests"),
      "@durable-streams/state/db": installed("@durable-streams/state", "dist/db.js"),
      "@durable-streams/state": installed("@durable-streams/state"),
      "y-protocols/awareness": installed("y-protocols", "awareness.js"),
      ai: installed("ai", "dist/index.mjs"),
      vitest: installed("vitest"),
      yjs: installed("yjs", "dist/yjs.mjs"),
    },
  },
  test: {
    include: ["conformance/**/*.test.mjs", "clients/**/*.test.mjs", "ai/**/*.test.mjs"],
    // Groups that the suite itself marks as concurrent only sleep; the others stay one after another, because
    // stream names in the suite are only unique per millisecond.
    maxConcurrency: 32,
    fileParallelism: false,
    testTimeout: 60_000,
  },
})
