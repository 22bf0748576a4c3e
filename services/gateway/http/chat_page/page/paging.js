// The blocks of the running request, from the KV manager, and those that the draft will need.

import { HELD, countOf, describe } from "./cells.js";
import { counted, drawBar, find, make, number } from "./dom.js";
import { call, eventsOf } from "./events.js";
import { BlockGrid } from "./grid.js";
import { blockStrip, level } from "./strip.js";

const MAX_PLANNED = 160; // cells
const KEYED = 4;

export class Paging {
  constructor() {
    this.size = 0; // of a block, in tokens
    this.grid = new BlockGrid(find("#device"), find("#tip"), find("#spoken"), () => {});
    this.grid.describe = (block, cell, tier) => (countOf(cell) ? describe(block, cell, tier) : `Block ${block} · not of this request`);
    this.clear();
  }

  // The pool of the chosen model.
  use(model) {
    this.size = model?.block_size || 0;
    if (model) this.setPool(model.device_blocks);
  }

  setPool(blocks) {
    if (this.pool === blocks) return;
    this.pool = blocks;
    find("#device").hidden = false;
    find("#device small").textContent = `${number(blocks)} blocks; those of other requests are not shown`;
    this.grid.show(new Uint32Array(blocks + 1));
  }

  clear() {
    this.id = "";
    this.last = null;
    this.cached = null;
    this.phase("none yet");
    this.note("");
    find("#facts").replaceChildren();
    find("#table").replaceChildren();
    find("#table-title").hidden = true;
    find("#paging").classList.remove("over");
    drawBar(find("#slots"), this.slots({ tokens: 0, room: 0, blocks: 0 }), 0);
    if (this.pool) {
      this.grid.show(new Uint32Array(this.pool + 1));
      this.grid.mark([]);
    }
  }

  // Follows a request until it ends, until `signal` is aborted, or until another one is followed.
  async follow(id, key, signal) {
    this.clear();
    this.id = id;
    this.phase("waiting for the gateway");
    try {
      const response = await call(`blocks/${id}`, key, { signal });
      for await (const { kind, data } of eventsOf(response)) if (this.id === id) this.take(kind, JSON.parse(data));
    } catch (error) {
      if (this.id !== id) return;
      if (signal.aborted) return this.end();
      this.phase("not shown");
      this.note(`${error.message}.`);
    }
  }

  take(kind, state) {
    if (kind === "blocks") this.show(state);
    else if (kind === "ended") this.end();
    else if (kind === "waiting") {
      this.phase(this.last ? "preempted or ending" : "in the queue");
      if (!this.last) this.note("It has no blocks yet: it waits for its first step.");
    } else if (kind === "unavailable") {
      this.phase("not shown now");
      this.note(`${state.message}.`);
    }
  }

  end() {
    if (!this.last) return this.phase("ended before it had blocks");
    this.phase("ended");
    find("#paging").classList.add("over");
    const full = this.last.committed;
    this.note(full
      ? `It has released its blocks. ${counted(full, "full block")} ${full === 1 ? "stays" : "stay"} cached under ${full === 1 ? "its key" : "their keys"}: a next turn that begins with the same tokens can hit them until they are evicted.`
      : "It has released its blocks. None was full, so none stays cached.");
  }

  // Tokens of the prompt that were hits, as the answer reports them.
  setCached(cached, prompt) {
    if (this.cached?.cached === cached && this.cached?.prompt === prompt) return;
    this.cached = { cached, prompt };
    if (this.last) this.showFacts();
  }

  show(state) {
    this.size = state.block_size;
    this.setPool(state.device_blocks);
    const [one] = state.sequences;
    this.last = one;
    this.phase(one.tier === "host" ? "swapped to host memory" : one.tokens < one.prompt ? "computing the prompt" : "generating");
    this.note("");
    drawBar(find("#slots"), this.slots(one), one.blocks * this.size);
    this.showFacts();
    find("#table-title").hidden = false;
    find("#table").replaceChildren(...blockStrip({ ...one, keyed: one.table.map((_, at) => one.first + at < one.committed), size: this.size },
      (block) => this.choose(block)).filter((child) => child !== ""));
    const cells = new Uint32Array(this.pool + 1);
    if (one.tier === "device") one.table.forEach((block, at) => (cells[block] = HELD | (one.first + at < one.committed ? KEYED : 0) | (Math.min(255, one.counts[at]) << 8)));
    this.grid.show(cells);
    if (!one.table.includes(this.grid.selected)) this.choose(0);
  }

  // Marks a block of the table in the pool; 0: none.
  choose(block) {
    this.grid.mark([], this.last?.tier === "device" ? block : 0, true);
  }

  slots({ tokens, room, blocks }) {
    return [
      { name: "tokens", value: tokens, style: "held", title: "Slots with computed keys and values" },
      { name: "granted ahead", value: Math.max(0, room - tokens), style: "lookahead", title: "Slots of tokens that are computed next" },
      { name: "unused", value: Math.max(0, blocks * this.size - room), style: "internal", title: "The rest of the last block: internal fragmentation" },
    ];
  }

  showFacts() {
    const one = this.last, shared = one.counts.filter((count) => count > 1).length;
    const rows = [
      ["blocks", `${number(one.blocks)} of ${number(this.size)} tokens each, ${number(shared)} shared`],
      ["full, with a key", number(one.committed)],
      ...(this.cached ? [["found in the cache", `${number(this.cached.cached)} of ${number(this.cached.prompt)} prompt tokens`]] : []),
      ...one.windows.map((kind) => [kind.name, `${number(kind.blocks)} blocks; ${number(kind.dropped)} have left the window`]),
    ];
    find("#facts").replaceChildren(...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  }

  // The prompt that the draft would make; 0 tokens: no draft.
  plan(tokens) {
    const box = find("#planned");
    if (!tokens || !this.size) return box.replaceChildren();
    const blocks = Math.ceil(tokens / this.size), last = tokens - (blocks - 1) * this.size;
    const shown = Math.min(blocks, MAX_PLANNED);
    box.replaceChildren(
      make("h3", {}, "Your draft", make("small", {}, ` a prompt of ${counted(tokens, "token")}: ${counted(blocks, "block")}, the last with ${number(last)} of ${number(this.size)}`)),
      make("ol", { class: "plan" }, ...Array.from({ length: shown }, (_, at) => make("li", {}, level(at === blocks - 1 ? last / this.size : 1)))),
      blocks > shown ? make("p", { class: "none" }, `and ${number(blocks - shown)} more`) : "");
  }

  phase(text) {
    find("#phase").textContent = text;
  }

  note(text) {
    find("#note").textContent = text;
  }
}
