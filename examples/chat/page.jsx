// The page of the chat: React, the AI SDK's useChat, and the official durable transport, unchanged.
//
// The application has the whole chat (GET /api/chat/{id}). This page shows it, and reads the answer that is being
// written from its stream. Whatever goes wrong, it loads the chat again: that is all there is to recover.

import { Chat, useChat } from "@ai-sdk/react"
import { createDurableChatTransport } from "@durable-streams/aisdk-transport"
import { stream } from "@durable-streams/client"
import { useCallback, useEffect, useRef, useState } from "react"
import { createRoot } from "react-dom/client"

const RETRY_MS = 1000

const transport = createDurableChatTransport({ api: "/api/chat" })
// The transport reads an answer from its start, also after a lost connection. Without this, the AI SDK would add what
// it reads to what it has, and show it twice. (useChat drops the flag, so the page makes the Chat itself.)
transport.resumeStreamIsReplay = true

const isBusy = (status) => status === "submitted" || status === "streaming"
const textOf = (message) => message.parts.map((part) => (part.type === "text" ? part.text : "")).join("")

/** Call `onQuestion` with each question that is appended, until the signal; a lost connection is opened again. */
async function followQuestions({ url, offset }, signal, onQuestion) {
  while (!signal.aborted) {
    try {
      const response = await stream({ url, offset, live: "sse", json: true, signal })
      response.subscribeJson(async (batch) => {
        batch.items.forEach(onQuestion)
        offset = batch.offset
      })
      await response.closed
    } catch {
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS))
    }
  }
}

function Page({ id, chat }) {
  const { messages, setMessages, sendMessage, resumeStream, clearError, status, error } = useChat({ chat })
  const [draft, setDraft] = useState("")
  const [problem, setProblem] = useState("")
  const [loads, setLoads] = useState(1) // how often the chat was to be loaded
  const [place, setPlace] = useState(null) // where the questions that come after the first load are
  const shown = useRef(new Set())
  const sent = useRef(null)
  shown.current = new Set(messages.map((message) => message.id))
  const busy = isBusy(status)

  const load = useCallback(async () => {
    const response = await fetch(`/api/chat/${id}`)
    if (!response.ok) throw new Error(`the application answers ${response.status}`)
    const saved = await response.json()
    if (isBusy(chat.status)) return // a question was asked meanwhile; its end loads the chat again
    clearError()
    setMessages(saved.messages)
    if (sent.current && !saved.messages.some((message) => message.id === sent.current.id)) setDraft(sent.current.text)
    sent.current = null
    setProblem("")
    setPlace((place) => place ?? { url: saved.questions, offset: saved.offset })
    if (saved.messages.at(-1)?.role === "user") await resumeStream()
  }, [id])

  // Load the chat at the start, after each answer, and after each failure until it succeeds.
  useEffect(() => {
    if (busy) return
    let timer
    load().catch((reason) => {
      setProblem(`reconnecting: ${reason.message}`)
      timer = setTimeout(() => setLoads((count) => count + 1), RETRY_MS)
    })
    return () => clearTimeout(timer)
  }, [loads])
  const wasBusy = useRef(false)
  useEffect(() => {
    if (wasBusy.current && !busy && !error) setLoads((count) => count + 1)
    wasBusy.current = busy
  }, [busy])
  useEffect(() => {
    if (!error) return
    setProblem(error.message)
    const timer = setTimeout(() => setLoads((count) => count + 1), RETRY_MS)
    return () => clearTimeout(timer)
  }, [error])

  // Questions of other tabs: the stream of questions is followed live.
  useEffect(() => {
    if (!place) return
    const leaving = new AbortController()
    followQuestions(place, leaving.signal, (question) => {
      if (!shown.current.has(question.id)) setLoads((count) => count + 1)
    })
    return () => leaving.abort()
  }, [place])

  const ask = (event) => {
    event.preventDefault()
    const text = draft.trim()
    if (!text || busy || !place) return
    sent.current = { id: crypto.randomUUID(), text }
    setDraft("")
    sendMessage({ id: sent.current.id, role: "user", parts: [{ type: "text", text }] })
  }
  const stop = () => fetch(`/api/chat/${id}/stop`, { method: "POST" })

  return (
    <>
      <header>
        <h1>A chat that survives</h1>
        <span id="status">{problem ? "reconnecting" : busy ? "answering" : place ? "ready" : "loading"}</span>
        <a href="/" target="_self">New chat</a>
        <a href={location.href} target="_blank">Second tab</a>
      </header>
      <ul id="messages">
        {messages.map((message, n) => (
          <li key={message.id} className={`${message.role} ${busy && n === messages.length - 1 ? "writing" : ""}`}>
            <span className="text">{textOf(message)}</span>
            {message.metadata?.end && <span className="end">{message.metadata.end}</span>}
          </li>
        ))}
      </ul>
      <div id="problem" role="status">{problem}</div>
      <form onSubmit={ask}>
        <input
          id="question" value={draft} onChange={(event) => setDraft(event.target.value)} autoComplete="off" autoFocus
          placeholder="Ask something, then reload while it answers" aria-label="Your question"
        />
        {busy ? <button type="button" onClick={stop}>Stop</button> : <button>Send</button>}
      </form>
    </>
  )
}

const id = new URL(location).searchParams.get("chat") ?? crypto.randomUUID()
history.replaceState(null, "", `/?chat=${id}`)
createRoot(document.getElementById("root")).render(<Page id={id} chat={new Chat({ id, transport })} />)
