// A list that creates only its visible rows. All rows have the same height, so a million rows cost as much as fifty.

import { h } from "./dom.js";

const OVERSCAN = 8;
const HEIGHT_MAX = 15_000_000; // beyond this height, browsers lose precision of scroll positions

export class VirtualList {
  /** `render(index)` returns the element of a row; `onopen(index)` is called on click or Enter. */
  constructor({ rowHeight, render, onopen, onscroll, onresize, label, id }) {
    this.rowHeight = rowHeight;
    this.render = render;
    this.onopen = onopen || (() => {});
    this.onscroll = onscroll || (() => {});
    this.count = 0;
    this.selected = -1;
    this.rows = new Map();
    this.space = h("div", { class: "virtual-space" });
    this.element = h("div", { class: "virtual", tabindex: "0", role: "listbox", "aria-label": label, id }, this.space);
    this.prefix = `${id || "list"}-row-`;
    this.element.addEventListener("scroll", () => this.#schedule(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.#key(event));
    this.space.addEventListener("click", (event) => {
      const row = event.target.closest("[data-index]");
      if (row && !event.target.closest("button, a")) this.select(Number(row.dataset.index), true);
    });
    this.observer = new ResizeObserver(() => {
      onresize?.();
      this.#schedule();
    });
    this.observer.observe(this.element);
  }

  get visible() {
    const { scrollTop, clientHeight } = this.element;
    const top = scrollTop * this.#scale();
    const first = Math.max(0, Math.floor(top / this.rowHeight));
    return [first, Math.min(this.count, first + Math.ceil(clientHeight / this.rowHeight) + 1)];
  }

  get atEnd() {
    const { scrollTop, clientHeight, scrollHeight } = this.element;
    return scrollTop + clientHeight >= scrollHeight - this.rowHeight;
  }

  setCount(count) {
    this.count = count;
    this.space.style.height = `${Math.min(count * this.rowHeight, HEIGHT_MAX)}px`;
    if (this.selected >= count) this.selected = -1;
    this.#schedule();
  }

  /** Redraw the visible rows. */
  refresh() {
    for (const row of this.rows.values()) row.remove();
    this.rows.clear();
    this.#schedule();
  }

  toEnd() {
    this.element.scrollTop = this.element.scrollHeight;
    this.draw(); // Not in the next frame: the place of the last row would be empty in this one.
    this.#schedule();
  }

  /** Keep the visible rows in place after rows were removed from the front. */
  shift(taken) {
    this.element.scrollTop = Math.max(0, this.element.scrollTop - taken * this.rowHeight);
    if (this.selected >= 0) this.selected = Math.max(-1, this.selected - taken);
    this.refresh();
  }

  select(index, open = false) {
    if (index < 0 || index >= this.count) return;
    const before = this.rows.get(this.selected);
    if (before) before.setAttribute("aria-selected", "false");
    this.selected = index;
    this.reveal(index);
    this.draw();
    const row = this.rows.get(index);
    if (row) {
      row.setAttribute("aria-selected", "true");
      this.element.setAttribute("aria-activedescendant", row.id);
    }
    if (open) this.onopen(index);
  }

  reveal(index) {
    const { element, rowHeight } = this;
    const scale = this.#scale();
    const top = (index * rowHeight) / scale;
    const bottom = top + rowHeight;
    if (top < element.scrollTop) element.scrollTop = top;
    else if (bottom > element.scrollTop + element.clientHeight) element.scrollTop = bottom - element.clientHeight;
  }

  /** The ratio of the height of the list to the maximum height of an element. */
  #scale() {
    const full = this.count * this.rowHeight;
    if (full <= HEIGHT_MAX) return 1;
    const room = this.element.clientHeight;
    return (full - room) / (HEIGHT_MAX - room);
  }

  #schedule() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
      this.onscroll();
    });
  }

  draw() {
    const [first, last] = this.visible;
    const from = Math.max(0, first - OVERSCAN);
    const until = Math.min(this.count, last + OVERSCAN);
    for (const [index, row] of this.rows) {
      if (index < from || index >= until) {
        row.remove();
        this.rows.delete(index);
      }
    }
    // If the list is higher than an element can be, rows are positioned around the visible part.
    const { scrollTop } = this.element;
    const shift = scrollTop * (this.#scale() - 1);
    for (let index = from; index < until; index += 1) {
      let row = this.rows.get(index);
      if (!row) {
        row = this.render(index);
        row.dataset.index = index;
        row.id = this.prefix + index;
        row.setAttribute("role", "option");
        row.setAttribute("aria-selected", index === this.selected ? "true" : "false");
        this.rows.set(index, row);
        this.space.append(row);
      }
      row.style.transform = `translateY(${index * this.rowHeight - shift}px)`;
    }
  }

  #key(event) {
    const page = Math.max(1, Math.floor(this.element.clientHeight / this.rowHeight) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1, PageDown: page, PageUp: -page };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) {
      const start = this.selected < 0 ? this.visible[0] - 1 : this.selected;
      this.select(Math.min(this.count - 1, Math.max(0, start + moves[event.key])));
    } else if (event.key === "Home") this.select(0);
    else if (event.key === "End") this.select(this.count - 1);
    else if (event.key === "Enter" && this.selected >= 0) this.onopen(this.selected);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
