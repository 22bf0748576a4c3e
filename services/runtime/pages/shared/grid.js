// A tier's blocks on a canvas. Only visible blocks are drawn, and after changes only the changed ones.

import { CACHED, HELD, WITHHELD, countOf, isKeyed, isPinned, ownerOf, stateOf, describe } from "./cells.js";

const SIZES = [2, 3, 4, 5, 6, 8, 10, 13, 17, 22, 28, 36, 46, 60, 78, 96];
const MIN_FIT = 3; // smaller cells only by zooming out
const MAX_FIT = 96; // a small pool fills its place
const FLASH_MS = 700;
const MAX_FLASHES = 1500;
const PALE = 0.62;
const STYLES = ["free", "cached", "held", "shared", "withheld"];

export class BlockGrid {
  constructor(figure, tip, spoken, onSelect) {
    this.tier = figure.id;
    this.figure = figure;
    this.scroll = figure.querySelector(".scroll");
    this.room = figure.querySelector(".room");
    this.canvas = figure.querySelector("canvas");
    this.context = this.canvas.getContext("2d");
    this.tip = tip;
    this.spoken = spoken;
    this.onSelect = onSelect;
    this.describe = describe;
    this.cells = new Uint32Array(1);
    this.bySequence = false;
    this.zoom = 0; // a cell's side in pixels; 0: fit all blocks
    this.highlight = new Set();
    this.selected = 0;
    this.cursor = 0;
    this.flashes = new Map();
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.readColours();
    new ResizeObserver(() => this.layOut()).observe(this.scroll);
    this.scroll.addEventListener("scroll", () => this.drawAll());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.readColours();
      this.drawAll();
    });
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.canvas.addEventListener("click", (event) => this.select(this.blockAt(event)));
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    this.canvas.addEventListener("focus", () => this.moveTo(this.cursor || 1));
    this.canvas.addEventListener("blur", () => {
      this.cursorShown = false;
      this.drawAll();
    });
    this.scroll.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.zoomBy(event.deltaY < 0 ? 1 : -1);
    }, { passive: false });
  }

  get total() {
    return this.cells.length - 1;
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    this.colours = Object.fromEntries(STYLES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    for (const name of ["ink", "surface", "mark", "flash"]) this.colours[name] = style.getPropertyValue(`--${name}`).trim();
    this.dark = matchMedia("(prefers-color-scheme: dark)").matches;
  }

  show(cells) {
    const resized = cells.length !== this.cells.length;
    this.cells = cells;
    this.flashes.clear();
    if (resized) this.layOut();
    else this.drawAll();
  }

  // Applies pairs of a block and its new number.
  change(pairs) {
    for (let index = 0; index < pairs.length; index += 2) this.cells[pairs[index]] = pairs[index + 1];
    if (pairs.length / 2 > MAX_FLASHES || this.flashes.size > 2 * MAX_FLASHES) {
      this.flashes.clear();
      this.drawAll();
      return;
    }
    const now = performance.now();
    for (let index = 0; index < pairs.length; index += 2) {
      this.drawOne(pairs[index], 1);
      this.flashes.set(pairs[index], now);
    }
    if (!this.still.matches) this.animate();
  }

  animate() {
    if (this.frame || !this.flashes.size) return;
    this.frame = requestAnimationFrame((now) => {
      this.frame = 0;
      for (const [block, since] of this.flashes) {
        const left = 1 - (now - since) / FLASH_MS;
        if (left <= 0) this.flashes.delete(block);
        this.drawOne(block, Math.min(1, Math.max(0, left)));
      }
      this.animate();
    });
  }

  mark(blocks, selected = 0, reveal = false) {
    this.highlight = new Set(blocks);
    this.selected = selected;
    if (reveal && (selected || blocks.length)) this.reveal(selected || blocks[0]);
    this.drawAll();
  }

  setColour(bySequence) {
    this.bySequence = bySequence;
    this.drawAll();
  }

  zoomBy(step) {
    const other = step > 0 ? SIZES.find((size) => size > this.size) : SIZES.findLast((size) => size < this.size);
    this.zoom = other || this.size;
    this.layOut();
  }

  zoomToFit() {
    this.zoom = 0;
    this.layOut();
  }

  layOut() {
    const width = this.scroll.clientWidth, height = this.scroll.clientHeight;
    if (!width || !height || !this.total) return;
    const fits = (size) => Math.ceil(this.total / Math.floor(width / size)) * size <= height;
    this.size = this.zoom || MIN_FIT;
    if (!this.zoom) while (this.size < MAX_FIT && fits(this.size + 1)) this.size++;
    this.columns = Math.max(1, Math.floor(width / this.size));
    this.rows = Math.ceil(this.total / this.columns);
    this.gap = this.size >= 13 ? 2 : this.size >= 4 ? 1 : 0;
    this.room.style.height = `${this.rows * this.size}px`;
    const scale = devicePixelRatio;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(Math.min(height, this.rows * this.size) * scale);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${this.canvas.height / scale}px`;
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.context.textAlign = "center";
    this.context.textBaseline = "middle";
    this.drawAll();
  }

  drawAll() {
    if (!this.columns) return;
    const { context, canvas, size } = this;
    context.clearRect(0, 0, canvas.width, canvas.height);
    const top = this.scroll.scrollTop, columns = this.columns, dimming = this.highlight.size > 0;
    const first = Math.floor(top / size) * columns + 1;
    const last = Math.min(this.total, Math.ceil((top + canvas.height) / size) * columns);
    const buckets = new Map(); // by colour, because setting the colour is slow
    for (let block = first; block <= last; block++) {
      const style = this.colourOf(block);
      const bucket = buckets.get(style);
      if (bucket) bucket.push(block - 1);
      else buckets.set(style, [block - 1]);
    }
    const side = size - this.gap;
    for (const [style, places] of buckets) {
      context.fillStyle = style;
      for (const place of places) {
        const row = Math.floor(place / columns);
        if (dimming) context.globalAlpha = this.dims(place + 1) ? 0.22 : 1;
        context.fillRect((place - row * columns) * size, row * size - top, side, side);
      }
    }
    context.globalAlpha = 1;
    if (size >= 8) for (let block = first; block <= last; block++) this.drawSigns(block);
    for (const block of this.highlight) this.drawRing(block);
    if (this.selected) this.drawRing(this.selected, 2.5);
    if (this.cursorShown) this.drawRing(this.cursor, 2, this.colours.ink);
  }

  drawOne(block, flash) {
    if (!this.columns) return;
    const [x, y] = this.placeOf(block);
    if (y < -this.size || y > this.canvas.height) return;
    const { context } = this, side = this.size - this.gap;
    context.clearRect(x, y, side, side);
    context.globalAlpha = this.dims(block) ? 0.22 : 1;
    context.fillStyle = this.colourOf(block);
    context.fillRect(x, y, side, side);
    if (flash > 0 && !this.still.matches && !this.dims(block)) {
      context.globalAlpha = (this.size < 6 ? 0.55 : 0.8) * flash * flash;
      context.fillStyle = this.colours.flash;
      context.fillRect(x, y, side, side);
    }
    context.globalAlpha = 1;
    if (this.size >= 8) this.drawSigns(block);
    if (this.highlight.has(block)) this.drawRing(block);
    if (block === this.selected) this.drawRing(block, 2.5);
  }

  // Signs that repeat the colour's meaning, if the cells are large enough.
  drawSigns(block) {
    const cell = this.cells[block], state = stateOf(cell), { context, size } = this;
    if (state === HELD && countOf(cell) < 2 && !isPinned(cell) && isKeyed(cell)) return;
    const [x, y] = this.placeOf(block), side = size - this.gap, middle = side / 2;
    context.globalAlpha = this.dims(block) ? 0.22 : 1;
    context.fillStyle = context.strokeStyle = this.colours.mark;
    if (state === CACHED) {
      context.beginPath();
      context.arc(x + middle, y + middle, Math.max(1, side / 9), 0, 7);
      context.fill();
    } else if (state === WITHHELD) {
      context.lineWidth = Math.max(1, side / 10);
      context.beginPath();
      context.moveTo(x + side * 0.2, y + side * 0.2);
      context.lineTo(x + side * 0.8, y + side * 0.8);
      context.moveTo(x + side * 0.8, y + side * 0.2);
      context.lineTo(x + side * 0.2, y + side * 0.8);
      context.stroke();
    } else if (state === HELD) {
      if (!isKeyed(cell)) this.drawPartlyFilled(x, y, side);
      if (countOf(cell) > 1 && size >= 13) {
        context.font = `600 ${Math.min(24, Math.round(side * 0.62))}px system-ui, sans-serif`;
        context.fillText(countOf(cell), x + middle, y + middle + side * 0.05);
      }
      if (isPinned(cell)) {
        context.beginPath();
        context.moveTo(x + side, y);
        context.lineTo(x + side, y + side * 0.45);
        context.lineTo(x + side * 0.55, y);
        context.fill();
      }
    }
    context.globalAlpha = 1;
  }

  // The map does not have the number of tokens: the upper half of each block that is not full is pale.
  drawPartlyFilled(x, y, side) {
    const { context } = this, { fillStyle, globalAlpha } = context;
    context.fillStyle = this.colours.surface;
    context.globalAlpha = PALE * globalAlpha;
    context.fillRect(x, y, side, Math.round(side / 2));
    context.fillStyle = fillStyle;
    context.globalAlpha = globalAlpha;
  }

  drawRing(block, width = 1.5, colour = this.colours.ink) {
    const [x, y] = this.placeOf(block), side = this.size - this.gap;
    this.context.strokeStyle = colour;
    this.context.lineWidth = this.size < 8 ? Math.min(width, 1) : width;
    const out = this.size < 8 ? 0.5 : 0;
    this.context.strokeRect(x - out + width / 2 - 0.5, y - out + width / 2 - 0.5, side + 2 * out - width + 1, side + 2 * out - width + 1);
  }

  dims(block) {
    return this.highlight.size > 0 && !this.highlight.has(block) && block !== this.selected;
  }

  colourOf(block) {
    const cell = this.cells[block], count = countOf(cell);
    switch (stateOf(cell)) {
      case CACHED: return this.colours.cached;
      case WITHHELD: return this.colours.withheld;
      case HELD:
        if (count < 2) return this.bySequence && ownerOf(cell) ? this.colourOfSequence(ownerOf(cell)) : this.colours.held;
        return this.colours.shared;
      default: return this.colours.free;
    }
  }

  // Consecutive ids get distant hues and lightnesses.
  colourOfSequence(id) {
    const light = (this.dark ? 52 : 42) + (id % 3) * 11;
    return `hsl(${Math.round(id * 137.5) % 360} 58% ${light}%)`;
  }

  placeOf(block) {
    const place = block - 1, row = Math.floor(place / this.columns);
    return [(place - row * this.columns) * this.size, row * this.size - this.scroll.scrollTop];
  }

  blockAt(event) {
    const column = Math.floor(event.offsetX / this.size);
    const row = Math.floor((event.offsetY + this.scroll.scrollTop) / this.size);
    const block = row * this.columns + column + 1;
    return column < this.columns && block <= this.total ? block : 0;
  }

  hover(event) {
    const block = this.blockAt(event);
    this.tip.hidden = !block;
    if (!block) return;
    this.tip.textContent = this.describe(block, this.cells[block], this.tier);
    const left = Math.min(event.clientX + 14, innerWidth - this.tip.offsetWidth - 8);
    this.tip.style.transform = `translate(${left}px, ${event.clientY + 16}px)`;
  }

  select(block) {
    this.onSelect(this.tier, block);
  }

  press(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    if (event.key in steps) this.moveTo(this.cursor + steps[event.key]);
    else if (event.key === "Home") this.moveTo(1);
    else if (event.key === "End") this.moveTo(this.total);
    else if (event.key === "PageDown") this.moveTo(Math.min(this.total, this.cursor + 10 * this.columns));
    else if (event.key === "PageUp") this.moveTo(Math.max(1, this.cursor - 10 * this.columns));
    else if (event.key === "Enter" || event.key === " ") this.select(this.cursor);
    else return;
    event.preventDefault();
  }

  moveTo(block) {
    if (block < 1 || block > this.total) return;
    this.cursor = block;
    this.cursorShown = this.canvas.matches(":focus-visible");
    this.spoken.textContent = this.describe(block, this.cells[block], this.tier);
    if (this.cursorShown) this.reveal(block);
    this.drawAll();
  }

  reveal(block) {
    if (!this.columns) return;
    const [, y] = this.placeOf(block), height = this.scroll.clientHeight;
    if (y < 0 || y + this.size > height) this.scroll.scrollTop += y - height / 2;
  }
}
