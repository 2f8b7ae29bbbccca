// Requests to one Durable Streams server. Every request of the page uses `Client.send`, which keeps recent requests with
// their responses, so that the page can show them and copy them as curl commands.

const LOG_MAX = 200;
const BODY_KEPT_MAX = 64 * 1024;

/** An error response of the server. */
export class Refused extends Error {
  constructor(status, code, detail, headers) {
    super(detail || `HTTP ${status}`);
    this.status = status;
    this.code = code;
    this.headers = headers;
  }

  /** The earliest stored offset, if older messages are no longer stored. */
  get earliest() {
    return this.status === 410 ? this.headers?.get("stream-earliest-offset") : null;
  }
}

/** The address of a stream: below `/v1/stream/`, or in a bucket. */
export class Address {
  constructor(name, bucket = null) {
    this.name = name;
    this.bucket = bucket;
  }

  get path() {
    if (this.bucket !== null) return `/ds/${encodeURIComponent(this.bucket)}/${encodeURIComponent(this.name)}`;
    return `/v1/stream/${this.name.split("/").map(encodeURIComponent).join("/")}`;
  }

  get title() {
    return this.bucket !== null ? `${this.bucket}/${this.name}` : this.name;
  }

  get hash() {
    const name = this.name.split("/").map(encodeURIComponent).join("/");
    return this.bucket !== null ? `#/bucket/${encodeURIComponent(this.bucket)}/${encodeURIComponent(this.name)}` : `#/stream/${name}`;
  }

  /** Streams that only the server writes to. */
  get isInternal() {
    return this.bucket === null && this.name.startsWith("__");
  }
}

export class Client {
  constructor(base) {
    this.base = base.replace(/\/+$/, "");
    this.token = "";
    this.log = [];
    this.onlog = () => {};
  }

  url(path, query) {
    const pairs = Object.entries(query || {}).filter(([, value]) => value !== null && value !== undefined);
    const search = pairs.map(([key, value]) => `${encodeURIComponent(key)}=${encodeURIComponent(value)}`).join("&");
    return this.base + path + (search ? `?${search}` : "");
  }

  /** Send one request. `quiet` omits it from the list of requests (polling, metadata of rows). */
  async send({ method = "GET", path, query, headers = {}, body, signal, quiet = false, bearer }) {
    const sent = { ...headers };
    const token = bearer || this.token;
    if (token) sent.Authorization = `Bearer ${token}`;
    const started = performance.now();
    const entry = { method, path, query, headers, body: kept(body), at: Date.now(), status: null, ms: null, answer: [] };
    let response;
    try {
      response = await fetch(this.url(path, query), {
        method,
        headers: sent,
        body,
        signal,
        cache: "no-store",
        credentials: "omit",
        referrerPolicy: "no-referrer",
      });
    } catch (error) {
      if (error.name !== "AbortError") {
        entry.error = String(error.message || error);
        this.#keep(entry, quiet);
      }
      throw error;
    }
    entry.status = response.status;
    entry.ms = performance.now() - started;
    entry.answer = [...response.headers];
    this.#keep(entry, quiet);
    response.entry = entry;
    return response;
  }

  /** Send a request and throw `Refused` unless the response is 2xx. */
  async expect(request) {
    const response = await this.send(request);
    if (response.ok) return response;
    throw await refusal(response);
  }

  async json(request) {
    return (await this.expect(request)).json();
  }

  curl({ method = "GET", path, query, headers = {}, body, live = false, bearer }) {
    const words = ["curl", live ? "-N" : "-i"];
    if (method === "HEAD") words.splice(1, 1, "-I");
    else if (method !== "GET") words.push("-X", method);
    // Do not copy the token itself.
    if (this.token || bearer) words.push("-H", '"Authorization: Bearer $DS_TOKEN"');
    for (const [name, value] of Object.entries(headers)) words.push("-H", quote(`${name}: ${value}`));
    let before = "";
    if (body instanceof Uint8Array) {
      before = `printf %s ${quote(base64(body))} | base64 -d | `;
      words.push("--data-binary", "@-");
    } else if (body) words.push("--data-raw", quote(body));
    words.push(quote(this.url(path, query)));
    return before + words.join(" ");
  }

  #keep(entry, quiet) {
    if (quiet) return;
    this.log.unshift(entry);
    this.log.length = Math.min(this.log.length, LOG_MAX);
    this.onlog(entry);
  }
}

/** Parse an error response: problem+json, an error of the subscription API, or plain text. */
export async function refusal(response) {
  const text = await response.text().catch(() => "");
  let code = "";
  let detail = text.slice(0, 500);
  try {
    const body = JSON.parse(text);
    code = body.code || body.error?.code || "";
    detail = body.detail || body.error?.message || body.title || (typeof body.error === "string" ? body.error : detail);
  } catch {
    // Not JSON: use the text.
  }
  return new Refused(response.status, code, detail || response.statusText, response.headers);
}

export function explain(error) {
  if (error instanceof Refused) return `${error.status}${error.code ? ` ${error.code}` : ""}: ${error.message}`;
  if (error instanceof TypeError) return "The server cannot be reached. It may be down, or it does not allow the origin of this page (CORS).";
  return String(error.message || error);
}

function kept(body) {
  if (body === undefined || body === null) return undefined;
  if (body instanceof Uint8Array) return body.length <= BODY_KEPT_MAX ? body : undefined;
  return body.length <= BODY_KEPT_MAX ? body : undefined;
}

function quote(text) {
  return /^[A-Za-z0-9_@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

export function base64(data) {
  let text = "";
  for (let at = 0; at < data.length; at += 8192) text += String.fromCharCode(...data.subarray(at, at + 8192));
  return btoa(text);
}

export function fromBase64(text) {
  return Uint8Array.from(atob(text.replace(/\s+/g, "")), (character) => character.charCodeAt(0));
}
