// StreamDB, the official state package's database over a stream, against the server at STREAMDB_TEST_URL.
// test_state_streamdb.py starts that server, runs this file and asserts how many tests were executed.

import { DurableStream } from "@durable-streams/client"
import { createStateSchema, createStreamDB, createLiveQueryCollection, eq } from "@durable-streams/state/db"
import { afterEach, describe, expect, test, vi } from "vitest"

const base = process.env.STREAMDB_TEST_URL
if (!base) throw new Error("STREAMDB_TEST_URL is not set: this file is run by tests/clients/test_state_streamdb.py")

// A Standard Schema that wants the given fields to be there.
const having = (...fields) => ({
  "~standard": {
    version: 1,
    vendor: "test",
    validate: (value) =>
      fields.every((field) => field in value) ? { value } : { issues: [{ message: `needs ${fields}` }] },
  },
})

const schema = createStateSchema({
  users: { schema: having("id", "name"), type: "user", primaryKey: "id" },
  orders: { schema: having("id", "user"), type: "order", primaryKey: "id" },
})
const registry = createStateSchema({
  streams: { schema: having("path", "contentType", "createdAt"), type: "stream", primaryKey: "path" },
})

let counter = 0
const freshName = () => `streamdb/${process.pid}-${counter++}`
const urlOf = (name) => `${base}/v1/stream/${name}`
const freshStream = () => DurableStream.create({ url: urlOf(freshName()), contentType: "application/json" })

const open = []
const database = (url, state = schema, options = {}) => {
  const db = createStreamDB({ streamOptions: { url, contentType: "application/json" }, state, ...options })
  open.push(db)
  return db
}
afterEach(() => {
  for (const db of open.splice(0)) db.close()
})

// Appends in flight together go out as one batch, in order.
const write = (stream, ...events) => Promise.all(events.map((event) => stream.append(JSON.stringify(event))))
const rows = (collection) => Object.fromEntries(collection.toArray.map((row) => [row.id ?? row.path, row]))
const eventually = (check) => vi.waitFor(check, { timeout: 50_000, interval: 20 })

describe("a database over a stream", () => {
  test("preload folds what is there", async () => {
    const stream = await freshStream()
    await write(
      stream,
      schema.users.insert({ value: { id: "1", name: "Ada" } }),
      schema.users.insert({ value: { id: "2", name: "Bob" } }),
      schema.orders.insert({ value: { id: "a", user: "1" } }),
      schema.users.update({ value: { id: "1", name: "Ada L." } }),
      schema.users.delete({ key: "2" })
    )
    const db = database(stream.url)
    await db.preload()
    expect(rows(db.collections.users)).toMatchObject({ 1: { name: "Ada L." } })
    expect(db.collections.users.size).toBe(1)
    expect(rows(db.collections.orders)).toMatchObject({ a: { user: "1" } })
    expect(db.offset).toBe((await stream.head()).offset)
  })

  test.each(["long-poll", "sse"])("changes arrive live over %s", async (live) => {
    const stream = await freshStream()
    const db = database(stream.url, schema, { live })
    await db.preload()
    expect(db.collections.users.size).toBe(0)
    await write(stream, schema.users.insert({ value: { id: "1", name: "Ada" } }))
    await eventually(() => expect(rows(db.collections.users)).toMatchObject({ 1: { name: "Ada" } }))
    await write(stream, schema.users.upsert({ value: { id: "1", name: "Zoë ✓" } }))
    await eventually(() => expect(rows(db.collections.users)).toMatchObject({ 1: { name: "Zoë ✓" } }))
    await write(stream, schema.users.delete({ key: "1" }))
    await eventually(() => expect(db.collections.users.size).toBe(0))
  })

  test("an optimistic action is confirmed by its transaction id", async () => {
    const stream = await freshStream()
    const db = database(stream.url, schema, {
      actions: ({ db: own, stream: to }) => ({
        addUser: {
          onMutate: (user) => own.collections.users.insert(user),
          mutationFn: async (user) => {
            const txid = crypto.randomUUID()
            await to.append(JSON.stringify(schema.users.insert({ value: user, headers: { txid } })))
            await own.utils.awaitTxId(txid)
          },
        },
      }),
    })
    await db.preload()
    await db.actions.addUser({ id: "9", name: "Cyd" }).isPersisted.promise
    expect(rows(db.collections.users)).toMatchObject({ 9: { name: "Cyd" } })

    const other = database(stream.url)
    await other.preload()
    expect(rows(other.collections.users)).toMatchObject({ 9: { name: "Cyd" } })
  })

  test("a live query joins two collections and follows them", async () => {
    const stream = await freshStream()
    const db = database(stream.url)
    await db.preload()
    const joined = createLiveQueryCollection({
      startSync: true,
      query: (q) =>
        q
          .from({ order: db.collections.orders })
          .join({ user: db.collections.users }, ({ order, user }) => eq(order.user, user.id), "inner")
          .select(({ order, user }) => ({ id: order.id, name: user.name })),
    })
    await write(
      stream,
      schema.users.insert({ value: { id: "1", name: "Ada" } }),
      schema.orders.insert({ value: { id: "a", user: "1" } })
    )
    await eventually(() => expect(rows(joined)).toMatchObject({ a: { name: "Ada" } }))
    await write(stream, schema.users.update({ value: { id: "1", name: "Ada L." } }))
    await eventually(() => expect(rows(joined)).toMatchObject({ a: { name: "Ada L." } }))
  })

  test("thousands of changes fold to the same state as in memory", async () => {
    const stream = await freshStream()
    const expected = new Map()
    for (let batch = 0; batch < 20; batch++) {
      const events = []
      for (let index = 0; index < 200; index++) {
        const id = String((batch * 7 + index * 13) % 500)
        if (expected.has(id) && index % 5 === 0) {
          expected.delete(id)
          events.push(schema.users.delete({ key: id }))
        } else {
          expected.set(id, `${batch}.${index}`)
          events.push(schema.users.upsert({ value: { id, name: `${batch}.${index}` } }))
        }
      }
      await write(stream, ...events)
    }
    const db = database(stream.url)
    await db.preload()
    const found = new Map(db.collections.users.toArray.map((row) => [row.id, row.name]))
    expect(found.size).toBe(expected.size)
    expect(Object.fromEntries(found)).toEqual(Object.fromEntries(expected))
  })
})

describe("the registry as a database of streams", () => {
  test("streams come, and go by deletion and by expiry", async () => {
    const db = database(urlOf("__registry__"), registry)
    await db.preload()
    const kept = freshName()
    const deleted = freshName()
    const expiring = freshName()
    const before = Date.now()
    await fetch(urlOf(kept), { method: "PUT", headers: { "content-type": "text/plain; charset=utf-8" } })
    await fetch(urlOf(deleted), { method: "PUT" })
    await fetch(urlOf(expiring), { method: "PUT", headers: { "stream-ttl": "1" } })
    const listed = () => rows(db.collections.streams)
    await eventually(() => expect(Object.keys(listed())).toEqual(expect.arrayContaining([kept, deleted, expiring])))
    expect(listed()[kept]).toMatchObject({ path: kept, contentType: "text/plain; charset=utf-8" })
    expect(listed()[deleted].contentType).toBe("application/octet-stream")
    expect(Math.abs(listed()[kept].createdAt - before)).toBeLessThan(60_000)
    await fetch(urlOf(deleted), { method: "DELETE" })
    await eventually(() => expect(Object.keys(listed())).not.toContain(deleted))
    await eventually(() => expect(Object.keys(listed())).not.toContain(expiring))
    expect(Object.keys(listed())).toContain(kept)
    expect(Object.keys(listed())).not.toContain("__registry__")
  })
})
