// A small live chart of the last minute: messages per second as bars, delivery times as points.

import { span } from "./format.js";

const SECONDS = 60;

export class Plot {
  constructor(canvas) {
    this.canvas = canvas;
    this.counts = new Array(SECONDS).fill(0);
    this.delays = Array.from({ length: SECONDS }, () => []);
    this.second = Math.floor(Date.now() / 1000);
    this.timer = setInterval(() => this.draw(), 500);
  }

  stop() {
    clearInterval(this.timer);
  }

  add(count, delayMs = null) {
    this.#advance();
    this.counts[SECONDS - 1] += count;
    if (delayMs !== null) this.delays[SECONDS - 1].push(delayMs);
  }

  /** The rate over the last seconds, and the median of the visible delivery times. */
  summary() {
    this.#advance();
    const recent = this.counts.slice(SECONDS - 6, SECONDS - 1);
    const rate = recent.reduce((sum, value) => sum + value, 0) / recent.length;
    const delays = this.delays.flat().sort((a, b) => a - b);
    return { rate, median: delays.length ? delays[delays.length >> 1] : null, samples: delays.length };
  }

  #advance() {
    const now = Math.floor(Date.now() / 1000);
    const steps = Math.min(now - this.second, SECONDS);
    for (let step = 0; step < steps; step += 1) {
      this.counts.shift();
      this.counts.push(0);
      this.delays.shift();
      this.delays.push([]);
    }
    this.second = now;
  }

  draw() {
    const { canvas } = this;
    if (!canvas.isConnected || canvas.clientWidth === 0) return;
    this.#advance();
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
    if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const style = getComputedStyle(canvas);
    const step = width / SECONDS;
    const most = Math.max(1, ...this.counts);
    context.fillStyle = style.getPropertyValue("--accent-soft");
    this.counts.forEach((value, at) => {
      if (value === 0) return;
      const tall = Math.max(2, (value / most) * (height - 14));
      context.fillRect(at * step + 0.5, height - tall, Math.max(1, step - 1), tall);
    });
    const slowest = Math.max(1, ...this.delays.flat());
    context.fillStyle = style.getPropertyValue("--warm");
    this.delays.forEach((values, at) => {
      for (const value of values.slice(0, 50)) {
        const top = height - 3 - (value / slowest) * (height - 18);
        context.fillRect(at * step + step / 2 - 1.25, top, 2.5, 2.5);
      }
    });
    context.fillStyle = style.getPropertyValue("--muted");
    context.font = "10px system-ui, sans-serif";
    context.textBaseline = "top";
    context.fillText(`${most}/s`, 2, 1);
    if (this.delays.some((values) => values.length)) {
      context.textAlign = "right";
      context.fillText(span(slowest), width - 2, 1);
      context.textAlign = "left";
    }
  }
}
