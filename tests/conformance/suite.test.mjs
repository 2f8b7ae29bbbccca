// The official conformance suite, whole, against the server at CONFORMANCE_URL.
// test_conformance.py starts that server, runs this file and asserts how many tests were executed.

import { runConformanceTests } from "@durable-streams/server-conformance-tests"

const { CONFORMANCE_URL, CONFORMANCE_LONG_POLL_TIMEOUT_MS } = process.env
if (!CONFORMANCE_URL || !CONFORMANCE_LONG_POLL_TIMEOUT_MS) {
  throw new Error("CONFORMANCE_URL is not set: this file is run by tests/conformance/test_conformance.py")
}

runConformanceTests({
  baseUrl: CONFORMANCE_URL,
  subscriptions: true,
  longPollTimeoutMs: Number(CONFORMANCE_LONG_POLL_TIMEOUT_MS),
})
