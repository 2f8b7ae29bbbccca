// What the official packages do when the server is killed and started again, and when the network is gone for a while.
// test_interruptions.py runs this file: READ is the server through a network that it cuts, STREAMS the server itself.

import { createDurableChatTransport } from "@durable-streams/aisdk-transport"
import { DurableStream } from "@durable-streams/client"
import { createStateSchema, createStreamDB } from "@durable-streams/state/db"
import { durableStreamConnection, materializeSnapshotFromDurableStream } from "@durable-streams/tanstack-ai-transport"
import { YjsProvider } from "@durable-streams/y-durable-streams"
import { YjsServer } from "@durable-streams/y-durable-streams/server"
import { describe, expect, test, vi } from "vitest"
import * as Y from "yjs"

const { CONTROL, READ, STREAMS, APP, OFFLINE_MS } = process.env
if (!CONTROL) throw new Error("this file is run by tests/clients/test_interruptions.py")

const WORDS = "a durable stream remembers every token that was written to it".split(" ")
const ANSWER = WORDS.map((word) => `${word} `).join("")
const PATIENCE_MS = 60_000 + 2 * Number(OFFLINE_MS)

const control = async (what) => expect((await fetch(`${CONTROL}/${what}`, { method: "POST" })).status).toBe(204)
const eventually = (check) => vi.waitFor(check, { timeout: PATIENCE_MS / 2, interval: 50 })

const within = (what, promise) =>
  Promise.race([promise, new Promise((_, reject) => setTimeout(() => reject(new Error(`too long: ${what}`)), PATIENCE_MS / 3))])

// Each runs `meanwhile` while readers have lost the server.
const killed = async (meanwhile) => {
  await control("kill")
  await meanwhile()
}
const offline = async (meanwhile) => {
  await control("offline")
  await meanwhile()
  await new Promise((resolve) => setTimeout(resolve, Number(OFFLINE_MS)))
  await control("online")
}

let counter = 0
const freshId = () => `interrupted-${process.pid}-${counter++}`
const json = (name) => DurableStream.create({ url: `${STREAMS}/${name}`, contentType: "application/json" })

// Over server-sent events the official client ends with an error when a connection breaks within a response. A reader
// then connects again as the examples do; a long-poll is sent again by the client itself.
describe.each([["the server is killed and restarted", killed], ["the network is gone", offline]])("when %s", (_, interrupted) => {
  test("the AI SDK transport resumes the answer", { timeout: PATIENCE_MS }, async () => {
    const chatId = freshId()
    const transport = createDurableChatTransport({ api: `${APP}/api/chat` })
    const asked = { trigger: "submit-message", chatId, messages: [], body: { hold: true } }
    const first = (await transport.sendMessages(asked)).getReader()
    const read = async (reader, chunks = []) => {
      for (let next = await reader.read(); !next.done; next = await reader.read()) chunks.push(next.value)
      return chunks
    }
    while ((await first.read()).value.delta !== "stream ");
    await eventually(async () => expect(await (await fetch(new URL("/metrics", STREAMS))).text()).toMatch(/live_readers\{[^}]*"sse"[^}]*\} [1-9]/))
    const lost = read(first).then(() => "ended", () => "failed")
    await interrupted(async () => {})
    expect(await lost).toBe("failed")
    const resumed = await transport.reconnectToStream({ chatId })
    await fetch(`${APP}/api/chat/${chatId}/release`, { method: "POST" })
    const chunks = await read(resumed.getReader())
    expect(chunks.flatMap((chunk) => (chunk.type === "text-delta" ? [chunk.delta] : [])).join("")).toBe(ANSWER)
    expect(chunks.at(-1)).toEqual({ type: "finish" })
  })

  test("the TanStack transport continues the conversation", { timeout: PATIENCE_MS }, async () => {
    const id = freshId()
    await json(`sessions/${id}`)
    const question = (number) => ({ id: `q${number}`, role: "user", parts: [{ type: "text", content: `${number}?` }] })
    const leaving = new AbortController()
    const connect = (initialOffset) => {
      const connection = durableStreamConnection({ sendUrl: `${APP}/api/session?id=${id}`, readUrl: `${READ}/sessions/${id}`, initialOffset })
      return { connection, events: connection.subscribe(leaving.signal)[Symbol.asyncIterator]() }
    }
    const until = async (events, messageId) => {
      const texts = []
      for (;;) {
        const { value } = await events.next()
        if (value.type === "TEXT_MESSAGE_CONTENT") texts.push(value.delta)
        if (value.type === "TEXT_MESSAGE_END" && value.messageId === messageId) return texts.join("")
      }
    }
    const saved = () => materializeSnapshotFromDurableStream({ readUrl: `${STREAMS}/sessions/${id}` })
    await connect().connection.send([question(1)])
    await eventually(async () => expect((await saved()).messages.map(({ parts }) => parts[0].content)).toEqual(["1?", ANSWER]))

    const first = connect((await saved()).offset)
    const live = until(first.events, "answer-2")
    await first.connection.send([question(1), question(2)])
    expect(await within("the answer before", live)).toBe(`2?${ANSWER}`)
    const { offset } = await saved()
    // Either the subscription continues, or it fails and the reader subscribes again where it was.
    const continued = until(first.events, "answer-3").catch(() => null)
    await interrupted(async () => {})
    await within("sending", first.connection.send([question(1), question(2), question(3)]))
    const answer = (await within("the subscription", continued)) ?? (await within("the new subscription", until(connect(offset).events, "answer-3")))
    expect(answer).toBe(`3?${ANSWER}`)
    leaving.abort()
  })

  test("a StreamDB over long-poll has every change", { timeout: PATIENCE_MS }, async () => {
    const any = { "~standard": { version: 1, vendor: "test", validate: (value) => ({ value }) } }
    const schema = createStateSchema({ users: { schema: any, type: "user", primaryKey: "id" } })
    const name = freshId()
    const stream = await json(name)
    const write = (from, until) =>
      Promise.all(Array.from({ length: until - from }, (_, n) => stream.append(JSON.stringify(schema.users.insert({ value: { id: `${from + n}`, name: "x" } })))))
    const db = createStreamDB({ streamOptions: { url: `${READ}/${name}`, contentType: "application/json" }, state: schema, live: "long-poll" })
    await write(0, 50)
    await db.preload()
    expect(db.collections.users.size).toBe(50)
    await interrupted(() => write(50, 100))
    await eventually(() => expect(db.collections.users.size).toBe(100))
    await write(100, 110)
    await eventually(() => expect(db.collections.users.size).toBe(110))
    expect(db.offset).toBe((await stream.head()).offset)
    db.close()
  })

  test("Yjs editors converge, with what was typed meanwhile", { timeout: PATIENCE_MS }, async () => {
    const yjs = new YjsServer({ dsServerUrl: new URL(READ).origin })
    await yjs.start()
    const editors = []
    const docId = freshId()
    const opened = async () => {
      const editor = { doc: new Y.Doc(), synced: false }
      editors.push(editor)
      connect(editor, `${yjs.url}/v1/yjs/test`, docId)
      await eventually(() => expect(editor.synced).toBe(true))
      return editor
    }
    const [one, two] = [await opened(), await opened()]
    type(one, "before")
    await eventually(() => expect(words(two)).toEqual(["before"]))
    await interrupted(async () => {
      type(one, "one")
      type(two, "two")
    })
    await eventually(() => expect([words(one), words(two)]).toEqual([["before", "one", "two"], ["before", "one", "two"]]))
    type(one, "after")
    await eventually(() => expect(words(two)).toEqual(["after", "before", "one", "two"]))
    expect(textOf(one)).toBe(textOf(two))
    const late = await opened()
    await eventually(() => expect(textOf(late)).toBe(textOf(one)))
    for (const editor of editors) editor.leave()
    await yjs.stop()
  })
})

const textOf = ({ doc }) => doc.getText("text").toString()
const words = (editor) => textOf(editor).split(";").filter(Boolean).sort()
const type = ({ doc }, word) => doc.getText("text").insert(doc.getText("text").length, `${word};`)

// As examples/editor does it: the provider sends only what is typed while it is connected, so it gets a document of its
// own, and a new provider takes the place of one that has failed.
function connect(editor, baseUrl, docId) {
  const shared = new Y.Doc()
  // The official Yjs server leaves an event stream open when the streams behind it are gone; a long-poll ends.
  const provider = new YjsProvider({ doc: shared, baseUrl, docId, liveMode: "long-poll" })
  const toStream = (update, origin) => origin !== provider && Y.applyUpdate(shared, update, "editor")
  let isOver = false
  let exchanged = false
  const over = () => {
    if (isOver) return false
    isOver = true
    editor.doc.off("update", toStream)
    provider.destroy()
    return true
  }
  editor.leave = over
  const again = () => over() && setTimeout(() => connect(editor, baseUrl, docId), 100)
  provider.on("synced", (synced) => {
    if (!synced || isOver || exchanged) return
    exchanged = true
    Y.applyUpdate(editor.doc, Y.encodeStateAsUpdate(shared), provider)
    Y.applyUpdate(shared, Y.encodeStateAsUpdate(editor.doc), "editor")
    editor.doc.on("update", toStream)
    shared.on("update", (update, origin) => origin !== "editor" && Y.applyUpdate(editor.doc, update, provider))
    editor.synced = true
  })
  provider.on("status", (state) => state === "disconnected" && again())
  provider.on("error", again)
}
