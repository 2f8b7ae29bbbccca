// The official Node server as a child process: the peer that the benchmarks measure against, and the yardstick of the
// conformance harness. Prints one line, `listening on URL`, and ends on SIGTERM or when its stdin closes, so that a parent
// that dies never leaves it behind.
//
// node bench/node_server.mjs [--data-dir DIR] [--long-poll-timeout-ms N] [--webhooks] [--no-compression]

import { createRequire } from "node:module"
import { parseArgs } from "node:util"

const { values } = parseArgs({
  options: {
    "data-dir": { type: "string" },
    "long-poll-timeout-ms": { type: "string", default: "30000" },
    webhooks: { type: "boolean", default: false },
    "no-compression": { type: "boolean", default: false },
  },
})

const pinned = createRequire(new URL("../tests/npm/package.json", import.meta.url))
let DurableStreamTestServer
try {
  ;({ DurableStreamTestServer } = pinned("@durable-streams/server"))
} catch (error) {
  console.error(`cannot load the official Node server: ${error.message}\nRun 'npm ci' in tests/npm first.`)
  process.exit(1)
}

// stdout carries one line, ours; what the server logs goes to stderr.
const announce = console.log.bind(console)
console.log = console.info = console.debug = console.error

const server = new DurableStreamTestServer({
  port: 0,
  host: "127.0.0.1",
  dataDir: values["data-dir"],
  longPollTimeout: Number(values["long-poll-timeout-ms"]),
  compression: !values["no-compression"],
  webhooks: values.webhooks,
})

const url = await server.start()
announce(`listening on ${url}`)

// Open live readers would keep server.stop() waiting; nothing here needs a clean end.
process.on("SIGTERM", () => process.exit(0))
process.stdin.on("end", () => process.exit(0))
process.stdin.resume()
