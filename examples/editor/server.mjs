// Serves the page of the editor and, at the same origin, the official Yjs server, which keeps documents in streams.
//
//   node server.mjs PORT STREAM_SERVER ASSETS
//
// The same origin matters: the Yjs server does not let pages of other origins read `Stream-SSE-Data-Encoding`.

import { YjsServer } from "@durable-streams/y-durable-streams/server"
import { createReadStream } from "node:fs"
import { createServer, request } from "node:http"
import { join } from "node:path"

const SILENCE_MS = 8000 // longer than the server lets a live read last (server.sse_reconnect_interval_secs)

const [port, streams, assets] = process.argv.slice(2)
const yjs = new YjsServer({ dsServerUrl: streams })
await yjs.start()

const files = {
  "/": [join(import.meta.dirname, "index.html"), "text/html; charset=utf-8"],
  "/assets/page.js": [join(assets, "page.js"), "text/javascript; charset=utf-8"],
}

/**
 * Pass a request on to the Yjs server, and its response back. A browser that leaves ends both. The Yjs server leaves a
 * live read open when the streams behind it are gone, so a silent one is ended here, and the browser connects again.
 */
function forward(incoming, response) {
  const { method, headers, url } = incoming
  const outgoing = request(yjs.url + url, { method, headers }, (answer) => {
    response.writeHead(answer.statusCode, answer.headers)
    answer.setTimeout(SILENCE_MS, () => response.destroy())
    answer.pipe(response)
  })
  outgoing.on("error", () => response.destroy())
  response.on("close", () => outgoing.destroy())
  incoming.pipe(outgoing)
}

createServer((incoming, response) => {
  if (incoming.url.startsWith("/v1/yjs/")) return forward(incoming, response)
  const [path, type] = files[new URL(incoming.url, "http://localhost").pathname] ?? []
  if (!path) return response.writeHead(404).end("not found")
  response.writeHead(200, { "Content-Type": type, "Cache-Control": "no-cache" })
  createReadStream(path).pipe(response)
}).listen(Number(port), "127.0.0.1")

process.on("SIGTERM", () => process.exit(0))
