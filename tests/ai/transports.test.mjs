// The official AI transports, unchanged, with an application in Python at AI_TEST_APP and our server at AI_TEST_STREAMS.
// test_transports.py starts both, runs this file and asserts how many tests were executed.

import { createDurableChatTransport } from "@durable-streams/aisdk-transport"
import { DurableStream } from "@durable-streams/client"
import { durableStreamConnection, materializeSnapshotFromDurableStream } from "@durable-streams/tanstack-ai-transport"
import { readUIMessageStream } from "ai"
import { describe, expect, test } from "vitest"

const app = process.env.AI_TEST_APP
const doomed = process.env.AI_TEST_DOOMED_APP
const streams = process.env.AI_TEST_STREAMS
if (!app || !streams) throw new Error("this file is run by tests/ai/test_transports.py")

const WORDS = "a durable stream remembers every token that was written to it".split(" ")
const ANSWER = WORDS.map((word) => `${word} `).join("")

let counter = 0
const freshId = () => `js-${process.pid}-${counter++}`
const transport = createDurableChatTransport({ api: `${app}/api/chat` })
const ask = (chatId, body = {}, abortSignal) =>
  transport.sendMessages({ trigger: "submit-message", chatId, messages: [], body, abortSignal })

const release = (chatId) => fetch(`${app}/api/chat/${chatId}/release`, { method: "POST" })

const collect = async (stream) => {
  const chunks = []
  for await (const chunk of stream) chunks.push(chunk)
  return chunks
}
const textOf = (chunks) => chunks.flatMap((chunk) => (chunk.type === "text-delta" ? [chunk.delta] : [])).join("")

describe("the AI SDK transport", () => {
  test("a message is answered, and the AI SDK builds it from the chunks", async () => {
    let message
    for await (const state of readUIMessageStream({ stream: await ask(freshId()) })) message = state
    expect(message.parts.filter((part) => part.type === "text").map((part) => part.text)).toEqual([ANSWER])
  })

  test("a reload in the middle of an answer resumes it: nothing is lost, nothing twice", async () => {
    const chatId = freshId()
    const leaving = new AbortController()
    const reader = (await ask(chatId, { hold: true }, leaving.signal)).getReader()
    for (let n = 0; n < 4; n++) await reader.read()
    leaving.abort()
    const resumed = await transport.reconnectToStream({ chatId })
    await release(chatId)
    expect(textOf(await collect(resumed))).toBe(ANSWER)
    expect(await transport.reconnectToStream({ chatId })).toBeNull()
  })

  test("a second tab reads the same answer", async () => {
    const chatId = freshId()
    const first = await ask(chatId, { hold: true })
    const second = await transport.reconnectToStream({ chatId })
    await release(chatId)
    const [one, two] = await Promise.all([collect(first), collect(second)])
    expect(textOf(one)).toBe(ANSWER)
    expect(two).toEqual(one)
  })

  test("a stop ends the answer for all readers", async () => {
    const chatId = freshId()
    const reading = collect(await ask(chatId, { hold: true }))
    const stopped = await fetch(`${app}/api/chat/${chatId}/stop`, { method: "POST" })
    expect(await stopped.json()).toEqual({ stopped: true })
    const chunks = await reading
    expect(chunks.at(-1)).toEqual({ type: "abort", reason: "the user stopped it" })
    expect(textOf(chunks).length).toBeLessThan(ANSWER.length)
  })

  test("a failure of the model is an error of the message, not silence", async () => {
    const errors = []
    const stream = await ask(freshId(), { fail: true })
    for await (const _ of readUIMessageStream({ stream, onError: (error) => errors.push(error) })) void _
    expect(errors.map(String)).toEqual(["Error: The answer could not be generated."])
  })
})

describe("the TanStack transport", () => {
  const connect = (id, options = {}) =>
    durableStreamConnection({ sendUrl: `${app}/api/session?id=${id}`, readUrl: `${streams}/sessions/${id}`, ...options })
  const question = (id, content) => ({ id, role: "user", parts: [{ type: "text", content }] })
  const until = async (chunks, done) => {
    const seen = []
    for await (const chunk of chunks) {
      seen.push(chunk)
      if (done(chunk)) break
    }
    return seen
  }
  const deltas = (chunks) => chunks.flatMap((chunk) => (chunk.type === "TEXT_MESSAGE_CONTENT" ? [chunk.delta] : [])).join("")
  const create = (id) => DurableStream.create({ url: `${streams}/sessions/${id}`, contentType: "application/json" })

  test("a conversation is followed live, and a later reader gets a snapshot of it", async () => {
    const id = freshId()
    await create(id)
    const connection = connect(id)
    const leaving = new AbortController()
    const reading = until(
      connection.subscribe(leaving.signal),
      (chunk) => chunk.type === "TEXT_MESSAGE_END" && chunk.messageId.startsWith("answer"),
    )
    await connection.send([question("q1", "Who remembers?")])
    const seen = await reading
    leaving.abort()
    const text = seen[0].type === "MESSAGES_SNAPSHOT" ? seen[0].messages.flatMap((m) => m.parts.map((p) => p.content)).join("") : ""
    expect(text + deltas(seen)).toBe(`Who remembers?${ANSWER}`)

    const saved = await materializeSnapshotFromDurableStream({ readUrl: `${streams}/sessions/${id}` })
    expect(saved.messages.map((message) => [message.role, message.parts[0].content])).toEqual([
      ["user", "Who remembers?"],
      ["assistant", ANSWER],
    ])

    const resumed = connect(id, { initialOffset: saved.offset })
    const second = new AbortController()
    const more = until(resumed.subscribe(second.signal), (chunk) => chunk.messageId === "answer-2" && chunk.type === "TEXT_MESSAGE_END")
    await resumed.send([question("q1", "Who remembers?"), question("q2", "And now?")])
    expect(deltas(await more)).toBe(`And now?${ANSWER}`)
    second.abort()
  })
})

describe("a crash of the application in the middle of an answer", () => {
  test("both transports see an error, not silence", async () => {
    const id = freshId()
    const answer = await createDurableChatTransport({ api: `${doomed}/api/chat` }).sendMessages({
      trigger: "submit-message", chatId: id, messages: [], body: { hold: true },
    })
    await DurableStream.create({ url: `${streams}/sessions/${id}`, contentType: "application/json" })
    const connection = durableStreamConnection({
      sendUrl: `${doomed}/api/session?id=${id}&hold`, readUrl: `${streams}/sessions/${id}`,
    })
    const leaving = new AbortController()
    const events = connection.subscribe(leaving.signal)[Symbol.asyncIterator]()
    await connection.send([{ id: "q1", role: "user", parts: [{ type: "text", content: "Who?" }] }])
    const session = []
    while (!session.some((event) => event.delta?.trim() === "stream" || event.messages?.length === 2)) session.push((await events.next()).value)

    await fetch(`${doomed}/api/crash`, { method: "POST" }).catch(() => {})
    const errors = []
    for await (const _ of readUIMessageStream({ stream: answer, onError: (error) => errors.push(error) })) void _
    expect(errors.map(String)).toEqual(["Error: The answer could not be generated."])
    let last
    do last = (await events.next()).value
    while (last.type !== "RUN_ERROR")
    expect(last.message).toBe("The answer could not be generated.")
    leaving.abort()
  })
})
