// A text editor for several people: CodeMirror, Yjs, and the official provider for durable streams, unchanged.
//
// The provider sends what is typed while it is connected, and nothing else. So the editor's document is kept apart from
// the provider's: after each connection, both get what the other one lacks. IndexedDB keeps what was typed but not sent
// over a reload, except the last letters, whose transactions end with the page: these are in the local storage.
// Invariant: a change is in the stream, or in this browser and will be sent.

import { EditorState } from "@codemirror/state"
import { EditorView, keymap, placeholder } from "@codemirror/view"
import { YjsProvider } from "@durable-streams/y-durable-streams"
import { yCollab, yUndoManagerKeymap } from "y-codemirror.next"
import { IndexeddbPersistence } from "y-indexeddb"
import { Awareness } from "y-protocols/awareness"
import * as Y from "yjs"

// The official client's queue (fastq) calls process.nextTick, which browsers do not have. Without it, the client drops what
// is typed while its first append is under way.
globalThis.process ??= { nextTick: (step) => queueMicrotask(step) }

const RETRY_MS = 1000
const COLORS = ["#0a7d4f", "#b8560f", "#6741d9", "#c2255c", "#1971c2", "#7a6a00"]

const docId = new URL(location).searchParams.get("doc") ?? "shared"
const doc = new Y.Doc()
const text = doc.getText("text")
const awareness = new Awareness(doc)
const color = COLORS[doc.clientID % COLORS.length]
const me = { user: { name: `Guest ${doc.clientID % 1000}`, color, colorLight: `${color}33` } }

const status = document.getElementById("status")
const show = (state) => (status.textContent = state)

// ---- what was typed right before the page was left

const LEFT = `editor/${docId}/left/`
const EMPTY = Y.encodeStateAsUpdate(doc)
const restored = Object.keys(localStorage).filter((key) => key.startsWith(LEFT))
let sent = Y.encodeStateVector(doc)

const keepUnsent = () => {
  const unsent = Y.encodeStateAsUpdate(doc, sent)
  if (unsent.length <= EMPTY.length) return
  localStorage.setItem(LEFT + doc.clientID, Array.from(unsent, (byte) => String.fromCharCode(byte)).join(""))
}
const restoreUnsent = () => {
  for (const key of restored) {
    Y.applyUpdate(doc, Uint8Array.from(localStorage.getItem(key), (letter) => letter.charCodeAt(0)))
  }
}
const forgetSent = () => {
  sent = Y.encodeStateVector(doc)
  for (const key of restored.splice(0)) localStorage.removeItem(key)
}
addEventListener("pagehide", keepUnsent)

// ---- the connection

function connect() {
  const shared = new Y.Doc()
  const provider = new YjsProvider({ doc: shared, baseUrl: `${location.origin}/v1/yjs/editor`, docId, awareness })
  const toStream = (update, origin) => origin !== provider && Y.applyUpdate(shared, update, "editor")
  const toEditor = (update, origin) => origin !== "editor" && Y.applyUpdate(doc, update, provider)

  const exchange = () => {
    Y.applyUpdate(doc, Y.encodeStateAsUpdate(shared, Y.encodeStateVector(doc)), provider)
    shared.on("update", toEditor)
    doc.on("update", toStream)
    Y.applyUpdate(shared, Y.encodeStateAsUpdate(doc, Y.encodeStateVector(shared)), "editor")
    awareness.setLocalState(me)
  }

  let failed = false
  const retry = () => {
    if (failed) return
    failed = true
    show("offline: your changes are kept here")
    doc.off("update", toStream)
    provider.destroy()
    setTimeout(connect, RETRY_MS)
  }

  let exchanged = false
  provider.on("synced", (synced) => {
    if (failed) return
    if (synced && !exchanged) {
      exchanged = true
      exchange()
    }
    show(provider.synced ? "saved" : "saving")
    if (provider.synced) forgetSent()
  })
  provider.on("status", (state) => state === "disconnected" && retry())
  provider.on("error", retry)
}

// ---- the editor

const undoManager = new Y.UndoManager(text)

new EditorView({
  parent: document.getElementById("editor"),
  state: EditorState.create({
    doc: text.toString(),
    extensions: [
      keymap.of(yUndoManagerKeymap),
      EditorView.lineWrapping,
      EditorView.contentAttributes.of({ "aria-label": "The text" }),
      placeholder("Type here, in two windows at once"),
      yCollab(text, awareness, { undoManager }),
    ],
  }),
})

const people = document.getElementById("people")
awareness.on("change", () => {
  const items = [...awareness.getStates()].filter(([, state]) => state.user).map(([id, { user }]) => {
    const item = document.createElement("li")
    item.style.setProperty("--color", user.color)
    item.textContent = id === doc.clientID ? `${user.name} (you)` : user.name
    return item
  })
  people.replaceChildren(...items)
})
awareness.setLocalState(me)

new IndexeddbPersistence(`editor/${docId}`, doc).whenSynced.then(restoreUnsent).then(connect)
