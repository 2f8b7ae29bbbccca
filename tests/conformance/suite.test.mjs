// The official conformance suite, whole, against the server at CONFORMANCE_URL.
// test_conformance.py starts that server, runs this file and asserts how many tests were executed.

import { runConformanceTests } from "@durable-streams/server-conformance-tests"

const { CONFORMANCE_URL, CONFORMANCE_LONG_POLL_TIMEOUT_MS, CONFORMANCE_TOKEN, CONFORMANCE_CONNECTIONS } = process.env
if (!CONFORMANCE_URL || !CONFORMANCE_LONG_POLL_TIMEOUT_MS) {
  throw new Error("CONFORMANCE_URL is not set: this file is run by tests/conformance/test_conformance.py")
}

if (CONFORMANCE_CONNECTIONS) {
  // How requests use connections: a new one for each of them, or at most so many that are kept.
  const connections = Number(CONFORMANCE_CONNECTIONS)
  const dispatcher = Symbol.for("undici.globalDispatcher.1")
  await fetch("data:,") // The dispatcher is made with the first use.
  const Agent = globalThis[dispatcher].constructor
  globalThis[dispatcher] = new Agent(connections ? { connections, keepAliveTimeout: 60_000 } : { pipelining: 0 })
}

if (CONFORMANCE_TOKEN) {
  // Behind a proxy that asks for tokens: every request carries one, but for those that say who they are themselves
  // (workers speak with the token of their wake).
  const plain = globalThis.fetch
  globalThis.fetch = (input, init) => {
    const headers = new Headers(init?.headers ?? (input instanceof Request ? input.headers : undefined))
    if (!headers.has("authorization")) headers.set("authorization", `Bearer ${CONFORMANCE_TOKEN}`)
    return plain(input, { ...init, headers })
  }
}

runConformanceTests({
  baseUrl: CONFORMANCE_URL,
  subscriptions: true,
  longPollTimeoutMs: Number(CONFORMANCE_LONG_POLL_TIMEOUT_MS),
})
