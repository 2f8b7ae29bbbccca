// Readers of shapes with the real npm clients, driven by lines of JSON on stdin; each command gets one line in return.
//
// open        a ShapeStream and a Shape;            rows     what it holds, by its columns
// collection  a collection of TanStack DB;          wait     until it holds what a digest says
// query       a live query on a collection          events   the operations and controls that it got

import { createHash } from "node:crypto"
import { createInterface } from "node:readline"

const npm = new URL("../npm/node_modules/", import.meta.url)
const electric = await import(new URL("@electric-sql/client/dist/index.mjs", npm))
const tanstack = new URL("@tanstack/electric-db-collection/", npm)

const readers = new Map()
const plain = (value) => JSON.parse(JSON.stringify(value, (_, one) => (typeof one === "bigint" ? `${one}n` : one)))

// Rows as text that Python can make, too: the columns in order, sorted by the first.
const spelled = (rows, columns) =>
  JSON.stringify(
    plain(rows.map((row) => columns.map((name) => row[name] ?? null))).sort((a, b) => (a[0] < b[0] ? -1 : 1)),
  )
const digest = (text) => createHash("sha1").update(text).digest("hex")

class Reader {
  constructor(columns) {
    this.columns = columns
    this.events = []
    this.seenAt = {}
    this.waiting = []
    this.errors = []
  }

  changed() {
    if (!this.waiting.length) return
    const now = digest(spelled(this.current(), this.columns))
    for (const one of this.waiting.filter((one) => one.digest === now)) one.resolve()
    this.waiting = this.waiting.filter((one) => one.digest !== now)
  }

  wait(wanted) {
    return new Promise((resolve) => {
      this.waiting.push({ digest: wanted, resolve })
      this.changed()
    })
  }
}

function open({ id, url, params, columns, sse, stamp, options }) {
  const reader = new Reader(columns)
  const aborter = new AbortController()
  const stream = new electric.ShapeStream({
    url,
    params,
    liveSse: sse,
    signal: aborter.signal,
    backoffOptions: { initialDelay: 50, maxDelay: 500, multiplier: 1.5 },
    ...options,
    onError: (error) => {
      reader.errors.push(String(error))
      return undefined
    },
  })
  const shape = new electric.Shape(stream)
  reader.current = () => shape.currentRows
  reader.stream = stream
  reader.close = () => aborter.abort()
  stream.subscribe((messages) => {
    const at = performance.timeOrigin + performance.now()
    for (const message of messages) {
      reader.events.push(message.headers.control ?? message.headers.operation)
      if (stamp && message.headers.lsn) reader.seenAt[message.value[stamp]] = at
    }
  })
  shape.subscribe(() => reader.changed())
  readers.set(id, reader)
}

async function collection({ id, url, params, columns, syncMode, subsetMethod }) {
  const { electricCollectionOptions } = await import(new URL("dist/esm/index.js", tanstack))
  const db = await import(new URL("node_modules/@tanstack/db/dist/esm/index.js", tanstack))
  const reader = new Reader(columns)
  const made = db.createCollection(
    electricCollectionOptions({
      id,
      syncMode,
      getKey: (row) => row[columns[0]],
      shapeOptions: { url, params, subsetMethod, onError: (error) => void reader.errors.push(String(error)) },
    }),
  )
  reader.collection = made
  reader.db = db
  reader.current = () => made.toArray
  reader.close = () => made.cleanup()
  made.subscribeChanges(() => reader.changed())
  readers.set(id, reader)
  if (syncMode !== "on-demand") await made.preload()
}

async function query({ id, of, at_least: atLeast, columns, limit }) {
  const { collection: source, db } = readers.get(of)
  const reader = new Reader(columns)
  const made = db.createLiveQueryCollection((q) => {
    const found = q.from({ row: source }).where(({ row }) => db.gte(row.n, atLeast))
    return limit ? found.orderBy(({ row }) => row.n, "asc").limit(limit) : found
  })
  reader.current = () => made.toArray
  reader.close = () => made.cleanup()
  made.subscribeChanges(() => reader.changed())
  readers.set(id, reader)
  await made.preload()
}

async function run(command) {
  const reader = readers.get(command.id)
  switch (command.do) {
    case "open":
      return open(command)
    case "collection":
      return await collection(command)
    case "query":
      return await query(command)
    case "rows":
      return plain(reader.current())
    case "wait":
      return await Promise.all((command.ids ?? [command.id]).map((id) => readers.get(id).wait(command.digest)))
    case "events":
      return reader.events
    case "errors":
      return [...readers.values()].flatMap((one) => one.errors)
    case "seen":
      return reader.seenAt
    case "handle":
      return reader.stream.shapeHandle
    case "close":
      return void (await reader.close())
    case "memory":
      return process.memoryUsage().rss
  }
  throw new Error(`unknown command ${command.do}`)
}

for await (const line of createInterface({ input: process.stdin })) {
  const command = JSON.parse(line)
  run(command).then(
    (result) => process.stdout.write(`${JSON.stringify({ number: command.number, result: result ?? null })}\n`),
    (error) => process.stdout.write(`${JSON.stringify({ number: command.number, error: String(error?.stack ?? error) })}\n`),
  )
}
process.exit(0)
