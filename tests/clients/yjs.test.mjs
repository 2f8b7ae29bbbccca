// The official Yjs provider and Yjs server, unchanged, with our server at YJS_TEST_URL behind them.
// test_yjs.py starts that server, runs this file and asserts how many tests were executed.

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
const eventually = (check) => vi.waitFor(check, { timeout: 50_000, interval: 20 })

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
  const provider = new YjsProvider({ doc, baseUrl: `${(options.server ?? yjs).url}/v1/yjs/test`, docId, awareness })
  open.push(provider)
  await eventually(() => expect(provider.synced).toBe(true))
  return { doc, provider, awareness, text: doc.getText("text") }
}

const documentOf = (docId, server = yjs) => `${server.url}/v1/yjs/test/docs/${docId}`

// The Yjs server redirects to the latest snapshot, or to the beginning of the updates if it has not compacted them yet.
const snapshotOf = async (docId, server = yjs) => {
  const found = await fetch(`${documentOf(docId, server)}?offset=snapshot`, { redirect: "manual" })
  return new URL(found.headers.get("location"), server.url).searchParams.get("offset").match(/.+_snapshot$/)?.[0]
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
    const [writer, reader, stale] = [await opened(docId), await opened(docId), await opened(docId)]
    await stale.provider.disconnect()
    const snapshots = []
    for (let n = 0; n < 60 && snapshots.length < 3; n++) {
      writer.text.insert(writer.text.length, `${n}:${"y".repeat(8000)};`)
      await eventually(() => expect(reader.text.length).toBe(writer.text.length))
      const latest = await snapshotOf(docId)
      if (latest && latest !== snapshots.at(-1)) snapshots.push(latest)
    }
    expect(snapshots.length).toBe(3)

    const read = (offset) => fetch(`${documentOf(docId)}?offset=${encodeURIComponent(offset)}`)
    await eventually(async () => expect((await read(snapshots[0])).status).toBe(404))
    const saved = await read(snapshots[2])
    expect(saved.status).toBe(200)
    expect([200, 204]).toContain((await read(saved.headers.get("stream-next-offset"))).status)

    const late = await opened(docId)
    await stale.provider.connect()
    for (const { text } of [late, stale]) await eventually(() => expect(text.toString()).toBe(writer.text.toString()))
    late.text.insert(0, "late;")
    await eventually(() => expect(writer.text.toString().startsWith("late;")).toBe(true))
  })

  test("documents survive a restart of the Yjs server, with their snapshots", async () => {
    const docId = freshId()
    const first = new YjsServer({ dsServerUrl: base, compactionThreshold: 16 * 1024 })
    await first.start()
    const writer = await opened(docId, { server: first })
    for (let n = 0; !(await snapshotOf(docId, first)); n++) {
      expect(n).toBeLessThan(100)
      writer.text.insert(writer.text.length, `${n}:${"z".repeat(4000)};`)
      await writer.provider.flush()
    }
    writer.text.insert(0, "after the snapshot;")
    await writer.provider.flush()
    open.splice(open.indexOf(writer.provider), 1)
    writer.provider.destroy()
    await first.stop()
    const later = await opened(docId)
    await eventually(() => expect(later.text.toString()).toBe(writer.text.toString()))
    expect(await snapshotOf(docId)).toBeTruthy()
  })

  test("bursts that are sent in batches arrive whole, in maps and arrays too, below a path with slashes", async () => {
    const docId = `${freshId()}/chapter-1/section-a`
    const [one, two] = [await opened(docId), await opened(docId)]
    for (const letter of "ab") {
      for (let n = 0; n < 200; n++) one.text.insert(one.text.length, letter)
      await one.provider.flush()
    }
    one.doc.transact(() => {
      one.doc.getMap("settings").set("theme", "dark")
      one.doc.getArray("items").push(["first", { second: 2 }])
    })
    const content = ({ doc, text }) => [text.toString(), doc.getMap("settings").toJSON(), doc.getArray("items").toJSON()]
    const expected = ["a".repeat(200) + "b".repeat(200), { theme: "dark" }, ["first", { second: 2 }]]
    await eventually(() => expect(content(two)).toEqual(expected))
    const late = await opened(docId)
    await eventually(() => expect(content(late)).toEqual(expected))
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
    for (let n = 0; n <= 20; n++) one.awareness.setLocalStateField("cursor", n)
    await eventually(() => expect(two.awareness.getStates().get(one.doc.clientID)).toEqual({ name: "Anna", cursor: 20 }))
    one.awareness.setLocalState(null)
    await eventually(() => expect(two.awareness.getStates().has(one.doc.clientID)).toBe(false))
    two.awareness.setLocalState({ name: "Bert" })
    await eventually(() => expect(one.awareness.getStates().get(two.doc.clientID)).toEqual({ name: "Bert" }))
    two.provider.destroy()
    await eventually(() => expect(one.awareness.getStates().has(two.doc.clientID)).toBe(false))
  })
})
