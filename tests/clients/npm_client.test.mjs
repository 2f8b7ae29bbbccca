// The official JavaScript client against the server at CLIENT_TEST_URL: what it writes is what it reads, exactly.
// test_npm_client.py starts that server, runs this file and asserts how many tests were executed.

import { DurableStream, IdempotentProducer, stream } from "@durable-streams/client"
import { MaterializedState, isChangeEvent } from "@durable-streams/state"
import { describe, expect, test } from "vitest"

const base = process.env.CLIENT_TEST_URL
if (!base) throw new Error("CLIENT_TEST_URL is not set: this file is run by tests/clients/test_npm_client.py")

let counter = 0
const freshUrl = () => `${base}/v1/stream/npm-client/${process.pid}-${counter++}`
const text = (options = {}) => DurableStream.create({ url: freshUrl(), contentType: "text/plain", ...options })
const json = (options = {}) => DurableStream.create({ url: freshUrl(), contentType: "application/json", ...options })
const binary = (options = {}) =>
  DurableStream.create({ url: freshUrl(), contentType: "application/octet-stream", ...options })

const everything = async (handle) => (await handle.stream({ live: false, offset: "-1" })).json()
const numbers = (from, to) => Array.from({ length: to - from }, (_, index) => ({ n: from + index }))
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

// A fetch that counts the requests of one method.
const counting = (method) => {
  const counted = (...args) => {
    if ((args[1]?.method ?? "GET") === method) counted.count++
    return fetch(...args)
  }
  counted.count = 0
  return counted
}

describe("a stream's life", () => {
  test("create, head, append, read, delete", async () => {
    const handle = await text({ ttlSeconds: 3600 })
    expect(await handle.head()).toMatchObject({ exists: true, contentType: "text/plain", streamClosed: false })
    await handle.append("hello ")
    await handle.append("world")
    const read = await handle.stream({ live: false })
    expect(await read.text()).toBe("hello world")
    expect(read.offset).toMatch(/^0000000000000002_000000000000000b_[0-9a-f]{16}$/)
    expect(read.upToDate).toBe(true)
    await handle.delete()
    expect(await handle.head()).toEqual({ exists: false })
  })

  test("creating again is harmless, with another type it is refused", async () => {
    const handle = await json({ body: JSON.stringify([{ a: 1 }]) })
    await DurableStream.create({ url: handle.url, contentType: "application/json" })
    await expect(DurableStream.create({ url: handle.url, contentType: "text/plain" })).rejects.toMatchObject({
      status: 409,
      text: expect.stringContaining('"config_mismatch"'),
    })
    expect(await everything(handle)).toEqual([{ a: 1 }])
  })

  test("what is missing is not found", async () => {
    await expect(stream({ url: freshUrl(), live: false })).rejects.toMatchObject({ status: 404 })
    expect(await DurableStream.head({ url: freshUrl() })).toEqual({ exists: false })
  })

  test("a sequence that goes back is refused", async () => {
    const handle = await text()
    await handle.append("a", { seq: "001" })
    await handle.append("b", { seq: "002" })
    await expect(handle.append("c", { seq: "001" })).rejects.toMatchObject({ status: 409 })
    expect(await (await handle.stream({ live: false })).text()).toBe("ab")
  })

  test("a closed stream takes no more and says where it ended", async () => {
    const handle = await text()
    await handle.append("a")
    const { finalOffset } = await handle.close({ body: "z" })
    expect(finalOffset).toMatch(/^0000000000000002_0000000000000002_[0-9a-f]{16}$/)
    expect(await handle.close()).toEqual({ finalOffset })
    await expect(handle.append("late")).rejects.toMatchObject({
      status: 409,
      headers: { "stream-closed": "true", "stream-next-offset": finalOffset },
    })
    const read = await handle.stream({ live: false })
    expect(await read.text()).toBe("az")
    expect(read.streamClosed).toBe(true)
  })
})

describe("batching", () => {
  test("appends that are not awaited share requests and keep their order", async () => {
    const counted = counting("POST")
    const handle = await json({ fetch: counted })
    await Promise.all(numbers(0, 500).map((message) => handle.append(JSON.stringify(message))))
    expect(counted.count).toBeLessThan(50)
    expect(await everything(handle)).toEqual(numbers(0, 500))
  })

  test("without batching every append is a request", async () => {
    const counted = counting("POST")
    const handle = await text({ fetch: counted, batching: false })
    for (let number = 0; number < 10; number++) await handle.append(`${number};`)
    expect(counted.count).toBe(10)
    expect(await (await handle.stream({ live: false })).text()).toBe("0;1;2;3;4;5;6;7;8;9;")
  })

  test("every byte value survives", async () => {
    const handle = await binary()
    const bytes = Uint8Array.from({ length: 256 }, (_, index) => index)
    await handle.append(bytes)
    await handle.append(bytes)
    expect(await (await handle.stream({ live: false })).body()).toEqual(new Uint8Array([...bytes, ...bytes]))
  })

  test("a stream of pieces is appended as it comes", async () => {
    const handle = await text()
    await handle.appendStream(
      (async function* () {
        for (let number = 0; number < 20; number++) {
          yield `${number};`
          await pause(2)
        }
      })()
    )
    const expected = Array.from({ length: 20 }, (_, number) => `${number};`).join("")
    expect(await (await handle.stream({ live: false })).text()).toBe(expected)
  })

  test("a writable stream writes exactly once and closes the stream", async () => {
    const handle = await text()
    const writer = handle.writable({ producerId: "writable" }).getWriter()
    for (let number = 0; number < 50; number++) await writer.write(`${number};`)
    await writer.close()
    const read = await handle.stream({ live: false })
    expect(await read.text()).toBe(Array.from({ length: 50 }, (_, number) => `${number};`).join(""))
  })
})

describe("idempotent producer", () => {
  test("many batches in flight arrive once and in order", async () => {
    const counted = counting("POST")
    const handle = await json()
    const producer = new IdempotentProducer(handle, "p", { fetch: counted, lingerMs: 1, maxBatchBytes: 200 })
    for (const message of numbers(0, 1000)) producer.append(JSON.stringify(message))
    await producer.flush()
    expect(counted.count).toBeGreaterThan(20)
    expect(await everything(handle)).toEqual(numbers(0, 1000))
    expect(producer.lastSuccessfulOffset).toBe((await handle.head()).offset)
    await producer.detach()
  })

  test("a retry of what had arrived makes no second copy", async () => {
    const handle = await json()
    let repeats = 0
    const forgetful = async (url, init) => {
      const first = await fetch(url, init)
      if (Math.random() < 0.5) return first
      // The answer is lost; the client sends the same request again.
      await first.arrayBuffer()
      const second = await fetch(url, init)
      if (first.ok) {
        expect(second.status).toBe(204)
        expect(second.headers.get("stream-next-offset")).toMatch(/^[0-9a-f]{16}_[0-9a-f]{16}_[0-9a-f]{16}$/)
        repeats++
      }
      return second
    }
    const producer = new IdempotentProducer(handle, "p", { fetch: forgetful, lingerMs: 0, maxBatchBytes: 100 })
    for (const message of numbers(0, 300)) producer.append(JSON.stringify(message))
    await producer.flush()
    expect(repeats).toBeGreaterThan(5)
    expect(await everything(handle)).toEqual(numbers(0, 300))
    await producer.detach()
  })

  test("a worker that lost its claim of a fenced stream stops with its first refused batch", async () => {
    const handle = await json({ headers: { "Write-Fence": "true" } })
    const wakes = await json()
    const name = (url) => url.slice(`${base}/v1/stream/`.length)
    const api = `${base}/v1/stream/__ds/subscriptions/${name(handle.url).replaceAll("/", "-")}`
    const send = (url, method, body, headers = {}) =>
      fetch(url, { method, body: JSON.stringify(body), headers: { "content-type": "application/json", ...headers } })
    await send(api, "PUT", { type: "pull-wake", streams: [name(handle.url)], wake_stream: name(wakes.url), lease_ttl_ms: 60_000 })
    await send(handle.url, "POST", "wake up")
    const claim = await (await send(`${api}/claim`, "POST", { worker: "w" })).json()

    const counted = counting("POST")
    const errors = []
    const options = { headers: { "Write-Token": claim.write_token }, epoch: claim.generation, lingerMs: 0, fetch: counted }
    const producer = new IdempotentProducer(handle, "agent", { ...options, onError: (error) => errors.push(error) })
    producer.append('"held"')
    await producer.flush()
    const { generation, wake_id } = claim
    await send(`${api}/release`, "POST", { generation, wake_id }, { authorization: `Bearer ${claim.token}` })
    const before = counted.count
    producer.append('"late"')
    await producer.flush().catch(() => {})
    expect(errors.length).toBe(1)
    expect(counted.count).toBe(before + 1)
    expect(await everything(handle)).toEqual(["wake up", "held"])
    await producer.detach()
  })

  test("a restart takes the epoch over, and the one before is fenced off", async () => {
    const handle = await json()
    const zombie = new IdempotentProducer(handle, "p", { lingerMs: 0, onError: (error) => (fenced = error) })
    let fenced
    zombie.append('{"from":"before"}')
    await zombie.flush()

    const heir = new IdempotentProducer(handle, "p", { lingerMs: 0 })
    await heir.restart()
    expect(heir.epoch).toBe(1)
    heir.append('{"from":"heir"}')
    await heir.flush()

    zombie.append('{"from":"zombie"}')
    await zombie.flush().catch(() => {})
    expect(fenced).toMatchObject({ name: "StaleEpochError", currentEpoch: 1 })
    expect(await everything(handle)).toEqual([{ from: "before" }, { from: "heir" }])
    await heir.detach()
  })

  test("auto-claim takes over from an unknown predecessor", async () => {
    const handle = await json()
    const before = new IdempotentProducer(handle, "p", { epoch: 5, lingerMs: 0 })
    before.append('{"n":0}')
    await before.detach()

    const claiming = new IdempotentProducer(handle, "p", { autoClaim: true, lingerMs: 0, maxBatchBytes: 20 })
    for (const message of numbers(1, 50)) claiming.append(JSON.stringify(message))
    await claiming.flush()
    expect(claiming.epoch).toBe(6)
    expect(await everything(handle)).toEqual(numbers(0, 50))
    await claiming.detach()
  })

  test("producers with different ids do not disturb each other", async () => {
    const handle = await json()
    const ids = ["a", "b", "c", "d"]
    const producers = ids.map((id) => new IdempotentProducer(handle, id, { lingerMs: 1, maxBatchBytes: 150 }))
    for (let number = 0; number < 200; number++) {
      producers.forEach((producer, index) => producer.append(JSON.stringify({ id: ids[index], n: number })))
    }
    await Promise.all(producers.map((producer) => producer.detach()))
    const all = await everything(handle)
    expect(all).toHaveLength(800)
    for (const id of ids) {
      expect(all.filter((message) => message.id === id).map((message) => message.n)).toEqual(
        Array.from({ length: 200 }, (_, number) => number)
      )
    }
  })

  test("closing with a last message ends the stream, and can be repeated", async () => {
    const handle = await json()
    const producer = new IdempotentProducer(handle, "p", { lingerMs: 0 })
    producer.append('{"n":0}')
    const { finalOffset } = await producer.close('{"n":1}')
    expect(await producer.close()).toEqual({ finalOffset })
    expect(await everything(handle)).toEqual(numbers(0, 2))
    expect(await handle.head()).toMatchObject({ streamClosed: true, offset: finalOffset })
  })

  test("bytes go through a producer unchanged", async () => {
    const handle = await binary()
    const producer = new IdempotentProducer(handle, "p", { lingerMs: 0 })
    const bytes = Uint8Array.from({ length: 256 }, (_, index) => 255 - index)
    producer.append(bytes)
    await producer.close(bytes)
    expect(await (await handle.stream({ live: false })).body()).toEqual(new Uint8Array([...bytes, ...bytes]))
  })
})

describe.each(["long-poll", "sse", true])("live reading, live = %s", (live) => {
  test("JSON that is appended meanwhile arrives once, in order, up to the end", async () => {
    const handle = await json()
    for (const message of numbers(0, 20)) await handle.append(JSON.stringify(message))
    const read = await handle.stream({ live, offset: "-1" })
    const writing = (async () => {
      for (const message of numbers(20, 120)) {
        await handle.append(JSON.stringify(message))
        if (message.n % 10 === 0) await pause(5)
      }
      await handle.close({ body: JSON.stringify({ n: 120 }) })
    })()
    const got = []
    for await (const message of read.jsonStream()) got.push(message)
    await writing
    expect(got).toEqual(numbers(0, 121))
    expect(read.streamClosed).toBe(true)
  })

  test("text keeps its line breaks, spaces and characters", async () => {
    const handle = await text()
    const pieces = ["one\ntwo\n", " leading", "", "🎈", "\n\n", "\u2028", "end "].filter((piece) => piece)
    const read = await handle.stream({ live, offset: "-1" })
    const writing = (async () => {
      for (const piece of pieces) {
        await handle.append(piece)
        await pause(5)
      }
      await handle.close()
    })()
    let got = ""
    for await (const piece of read.textStream()) got += piece
    await writing
    expect(got).toBe(pieces.join(""))
  })

  test("bytes arrive as they were sent", async () => {
    const handle = await binary()
    const piece = Uint8Array.from({ length: 256 }, (_, index) => index)
    await handle.append(piece)
    const read = await handle.stream({ live, offset: "-1" })
    const got = []
    const writing = (async () => {
      for (let number = 0; number < 5; number++) {
        await handle.append(piece)
        await pause(5)
      }
      await handle.close({ body: piece })
    })()
    for await (const chunk of read.bodyStream()) got.push(...chunk)
    await writing
    expect(got).toEqual(Array.from({ length: 7 }, () => [...piece]).flat())
  })

  test("a reader that stops half-way resumes from its offset without loss or repetition", async () => {
    const handle = await json()
    const got = []
    let resumeAt = "-1"
    for (let life = 0; life < 4; life++) {
      for (const message of numbers(life * 10, life * 10 + 10)) await handle.append(JSON.stringify(message))
      const abort = new AbortController()
      const read = await handle.stream({ live, offset: resumeAt, signal: abort.signal })
      await new Promise((resolve) => {
        const unsubscribe = read.subscribeJson((batch) => {
          got.push(...batch.items)
          resumeAt = batch.offset
          if (got.length >= life * 10 + 10) {
            unsubscribe()
            resolve()
          }
        })
      })
      read.cancel()
      abort.abort()
    }
    expect(got).toEqual(numbers(0, 40))
  })

  test("from `now` on only what is new arrives", async () => {
    const handle = await json()
    await handle.append('{"old":true}')
    const read = await handle.stream({ live, offset: "now" })
    setTimeout(() => handle.close({ body: '{"new":true}' }), 100)
    const got = []
    for await (const message of read.jsonStream()) got.push(message)
    expect(got).toEqual([{ new: true }])
  })

  test("a reader outlives the server's ending of responses", async () => {
    // The server ends SSE responses and long-polls after about a second: this reader has to come back.
    const handle = await json()
    const read = await handle.stream({ live, offset: "-1" })
    const writing = (async () => {
      for (const message of numbers(0, 12)) {
        await pause(250)
        await handle.append(JSON.stringify(message))
      }
      await handle.close()
    })()
    const got = []
    for await (const message of read.jsonStream()) got.push(message)
    await writing
    expect(got).toEqual(numbers(0, 12))
  })
})

describe("state protocol", () => {
  test("change events fold to the state that they describe", async () => {
    const handle = await json()
    const change = (operation, key, value) =>
      handle.append(JSON.stringify({ type: "user", key, value, headers: { operation } }))
    await change("insert", "1", { name: "Ada" })
    await change("insert", "2", { name: "Bob" })
    await change("update", "1", { name: "Ada Lovelace" })
    await change("delete", "2")
    const events = await everything(handle)
    expect(events.every(isChangeEvent)).toBe(true)
    const state = new MaterializedState()
    state.applyBatch(events)
    expect([...state.getType("user")]).toEqual([["1", { name: "Ada Lovelace" }]])
  })
})
