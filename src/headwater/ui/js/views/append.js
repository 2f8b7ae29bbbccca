// The append form, with the full response below it. Send the same sequence number twice to see idempotency.

import { explain } from "../client.js";
import { button, field, form, h, replace, select } from "../dom.js";
import { answerPanel, producerMeaning } from "./answer.js";

export class AppendBox {
  constructor(app, address, info, onappended) {
    this.app = app;
    this.address = address;
    this.info = info;
    this.onappended = onappended;
    const example = info.json ? '{"hello": "world"}' : "hello";
    this.text = h("textarea", { class: "mono", id: "append-body", rows: "3", spellcheck: "false", placeholder: example, "aria-label": "Message" });
    this.encoding = select([["text", "text"], ["hex", "hex bytes"], ["file", "file"]], info.text ? "text" : "hex", { id: "append-encoding", "aria-label": "Format of the body", onchange: () => this.#encodingChanged() });
    this.file = h("input", { type: "file", id: "append-file", hidden: true, "aria-label": "File to append" });
    const small = (id, placeholder, label) => h("input", { id, placeholder, "aria-label": label, class: "mono", autocomplete: "off", spellcheck: "false" });
    this.producer = small("producer-id", "none", "Producer id");
    this.epoch = small("producer-epoch", "0", "Producer epoch");
    this.seq = small("producer-seq", "0", "Producer seq");
    this.streamSeq = small("stream-seq", "none", "Stream-Seq");
    this.advance = h("input", { type: "checkbox", id: "producer-advance", checked: false });
    this.answer = h("div", { id: "append-answer" });
    this.element = form(
      { class: "append-box", id: "append-box", onsubmit: () => this.#send() },
      this.text,
      this.file,
      h(
        "div",
        { class: "fields" },
        field("Body", this.encoding),
        field("Producer-Id", this.producer),
        field("Producer-Epoch", this.epoch),
        field("Producer-Seq", this.seq),
        field("Stream-Seq", this.streamSeq),
      ),
      h(
        "div",
        { class: "row wrap" },
        button("Append", undefined, { symbol: "send", kind: "primary", type: "submit", id: "append-send", title: "Append (Ctrl+Enter)" }),
        h("label", { class: "check" }, this.advance, " increase Producer-Seq after each success"),
        button("curl", () => this.#curl(), { symbol: "terminal", kind: "quiet small", title: "Copy this append as curl" }),
      ),
      this.answer,
    );
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.element.requestSubmit();
      }
    });
  }

  focus() {
    this.text.focus();
  }

  /** Take the content of a message. An array needs brackets around it, or its elements would be appended. */
  fill(message) {
    this.encoding.value = this.info.text ? "text" : "hex";
    this.#encodingChanged();
    const text = message.string();
    if (!this.info.text) this.text.value = [...message.bytes()].map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
    else this.text.value = this.info.json && text.trimStart().startsWith("[") ? `[${text}]` : text;
  }

  #encodingChanged() {
    this.file.hidden = this.encoding.value !== "file";
    this.text.hidden = this.encoding.value === "file";
  }

  async #request() {
    const headers = { "Content-Type": this.info.type };
    const producer = this.producer.value.trim();
    if (producer) {
      headers["Producer-Id"] = producer;
      headers["Producer-Epoch"] = this.epoch.value.trim() || "0";
      headers["Producer-Seq"] = this.seq.value.trim() || "0";
    }
    if (this.streamSeq.value.trim()) headers["Stream-Seq"] = this.streamSeq.value.trim();
    return { method: "POST", path: this.address.path, headers, body: await this.#body() };
  }

  async #body() {
    if (this.encoding.value === "file") {
      if (this.file.files.length === 0) throw new Error("Choose a file first.");
      return new Uint8Array(await this.file.files[0].arrayBuffer());
    }
    if (this.encoding.value === "text") return this.text.value;
    const digits = this.text.value.replace(/\s+/g, "");
    if (!/^([0-9a-f]{2})+$/i.test(digits)) throw new Error("Enter pairs of hexadecimal digits, such as 68 65 6c 6c 6f.");
    return Uint8Array.from(digits.match(/../g), (pair) => parseInt(pair, 16));
  }

  async #curl() {
    try {
      this.app.copyCurl(await this.#request());
    } catch (error) {
      this.#problem(error);
    }
  }

  async #send() {
    try {
      const request = await this.#request();
      this.app.delays.appended(this.address.path, request.body, this.info.json);
      const response = await this.app.client.send(request);
      const body = await response.text();
      const meaning = request.headers["Producer-Id"] ? producerMeaning(response.status, response.headers) : response.ok ? "Appended." : null;
      replace(this.answer, answerPanel(this.app, response.entry, { meaning, body }));
      if (response.ok) {
        if (request.headers["Producer-Id"] && this.advance.checked) this.seq.value = String(Number(this.seq.value || "0") + 1);
        this.onappended();
      }
    } catch (error) {
      this.#problem(error);
    }
  }

  #problem(error) {
    replace(this.answer, h("p", { class: "problem", role: "alert", text: explain(error) }));
  }
}
