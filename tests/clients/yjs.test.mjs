// The official Yjs provider and Yjs server, unchanged, with our server at YJS_TEST_URL behind them.
// test_yjs.py starts that server, runs this file and asserts how many tests were executed.

import { DurableStream } from "@durable-streams/client"
import { YjsProvider } from "@durable-streams/y-durable-streams"
import { YjsServer } from "@durable-streams/y-durable-streams/server"
import { afterAll, afterEach, beforeAll, describe, expect, test, vi } from "vitest"
import { Awareness } from "y-protocols/awareness"
import * as Y from "yjs"

const base = process.env.YJS_TEST_URL
if (!base) throw new Error("YJS_TEST_URL is not set: this file is run by tests/clients/test_yjs.py")

let yjs
const open = []
let counter = 0
const freshId = () => `doc-${process.pid}-${counter++}`
const eventually = (check) => vi.waitFor(check, { timeout: 20_000, interval: 20 })

beforeAll(async () => {
  yjs = new YjsServer({ dsServerUrl: base, compactionThreshold: 64 * 1024 })
  await yjs.start()
})
afterAll(() => yjs.stop())
afterEach(() => {
  for (const provider of open.splice(0)) provider.destroy()
})

const opened = async (docId, options = {}) => {
  const doc = new Y.Doc()
  const awareness = options.awareness ? new Awareness(doc) : undefined
  const provider = new YjsProvider({ doc, baseUrl: `${yjs.url}/v1/yjs/test`, docId, awareness, liveMode: options.liveMode })
  open.push(provider)
  await eventually(() => expect(provider.synced).toBe(true))
  return { doc, provider, awareness, text: doc.getText("text") }
}

describe("the Yjs provider", () => {
  test("two editors see the same text", async () => {
    const docId = freshId()
    const [one, two] = [await opened(docId), await opened(docId)]
    one.text.insert(0, "Hello ")
    await eventually(() => expect(two.text.toString()).toBe("Hello "))
    two.text.insert(6, "there")
    await eventually(() => expect(one.text.toString()).toBe("Hello there"))
  })

  test("concurrent edits of many editors converge", async () => {
    const docId = freshId()
    const editors = await Promise.all(Array.from({ length: 6 }, () => opened(docId)))
    for (let turn = 0; turn < 10; turn++) editors.forEach(({ text }, n) => text.insert(0, `[${n}.${turn}]`))
    await eventually(() => {
      const texts = editors.map(({ text }) => text.toString())
      expect(new Set(texts).size).toBe(1)
      expect(texts[0].match(/\[\d\.\d\]/g).length).toBe(60)
    })
  })

  test("a document over 1 MiB is stored and loaded", async () => {
    const docId = freshId()
    const writer = await opened(docId)
    const large = "x".repeat(1_200_000)
    writer.text.insert(0, large)
    const reader = await opened(docId)
    await eventually(() => expect(reader.text.length).toBe(large.length))
    writer.text.insert(0, "and on ")
    await eventually(() => expect(reader.text.toString().startsWith("and on x")).toBe(true))
  })

  test("reading continues across compactions", async () => {
    const docId = freshId()
    const [writer, reader] = [await opened(docId), await opened(docId)]
    for (let n = 0; n < 30; n++) {
      writer.text.insert(writer.text.length, `${n}:${"y".repeat(8000)};`)
      await eventually(() => expect(reader.text.length).toBe(writer.text.length))
    }
    const late = await opened(docId)
    await eventually(() => expect(late.text.toString()).toBe(writer.text.toString()))
    late.text.insert(0, "late;")
    await eventually(() => expect(writer.text.toString().startsWith("late;")).toBe(true))
  })

  // The provider does not send what was written while it was disconnected, on the official server either.
  test("a provider that reconnects catches up, and is followed again", async () => {
    const docId = freshId()
    const [one, two] = [await opened(docId), await opened(docId)]
    one.text.insert(0, "a")
    await eventually(() => expect(two.text.toString()).toBe("a"))
    await two.provider.disconnect()
    one.text.insert(1, "b")
    await two.provider.connect()
    await eventually(() => expect(two.text.toString()).toBe("ab"))
    two.text.insert(2, "c")
    await eventually(() => expect(one.text.toString()).toBe("abc"))
  })

  test("presence is shared, and goes with its editor", async () => {
    const docId = freshId()
    const [one, two] = [await opened(docId, { awareness: true }), await opened(docId, { awareness: true })]
    one.awareness.setLocalState({ name: "Anna" })
    await eventually(() => expect(two.awareness.getStates().get(one.doc.clientID)).toEqual({ name: "Anna" }))
    one.awareness.setLocalState(null)
    await eventually(() => expect(two.awareness.getStates().has(one.doc.clientID)).toBe(false))
  })
})
