// The details of one block or one sequence.

import { counted, make, number } from "./dom.js";
import { copyButton, idText, idWithCopy, textWithId } from "./ids.js";
import { blockStrip, level } from "./strip.js";

const MAX_KEY = 40;

// Each entry: the style of the swatch, the name, and what it means.
export const LEGEND = [
  ["free", "free", "No holder and no contents"],
  ["cached", "cached", "No holder; can be hit until it is evicted"],
  ["held", "held by one", "One holder, a table entry or a pin; full"],
  ["partly", "partly filled", "Held, not all slots have tokens: upper half pale"],
  ["shared", "shared", "Several holders; a large cell shows how many"],
  ["pinned", "pinned", "Held by a pin"],
  ["withheld", "withheld", "Taken out of use because of a fault"],
];

const STATES = { free: "It has no holder and no key.", cached: "It has no holder, but its contents can be hit until it is evicted.", held: "", withheld: "It was withheld because of a fault." };

export function blockPanel(block, choose) {
  const { holders, pins } = block;
  return [
    make("h2", {}, `Block ${block.block}`, make("small", {}, ` ${block.kind ? `of kind ${block.kind}, ` : ""}${block.tier} memory`)),
    make("p", { class: "chips" },
      make("span", { class: `chip ${block.count > 1 ? "shared" : block.state}` }, block.count > 1 ? "shared" : block.state),
      make("span", {}, `reference count ${block.count}`),
      pins ? make("span", {}, counted(pins, "pin")) : ""),
    STATES[block.state] ? make("p", {}, STATES[block.state]) : "",
    block.outlived ? make("p", {}, "It outlived its engine: its contents were computed before the engine's last start.") : "",
    make("h3", {}, "Table entries"),
    holders.length
      ? make("ul", { class: "holders" }, ...holders.map((holder) => make("li", {},
          make("button", { "data-key": `sequence ${holder.sequence}`, onclick: () => choose(holder.sequence) }, `sequence ${holder.sequence}`),
          make("span", {}, idText(holder.request), ` · logical block ${holder.logical}`),
          fillBar(holder.tokens, block.block_size))))
      : make("p", { class: "none" }, pins ? "None: its only holders are pins." : "None."),
    make("h3", {}, "Key"),
    block.key ? make("p", { class: "key" }, idText(block.key, MAX_KEY), copyButton("key", block.key)) : make("p", { class: "none" }, "None: it is not full, or its tokens are not computed yet."),
    make("h3", {}, "Last events"),
    block.events.length ? make("ol", { class: "history" }, ...block.events.map(eventLine)) : make("p", { class: "none" }, "No events are kept."),
  ];
}

export function sequencePanel(sequence, chooseBlock, chooseSequence) {
  const { table, counts, keyed, tokens, block_size: size } = sequence;
  const shared = counts.filter((count) => count > 1).length;
  return [
    make("h2", {}, `Sequence ${sequence.sequence}`),
    make("dl", { class: "facts" },
      ...fact("request", idWithCopy("request", sequence.request)),
      ...fact("tokens computed", `${number(tokens)} of room for ${number(sequence.room)}`),
      ...fact("blocks", `${number(table.length)} in ${sequence.tier} memory, ${number(shared)} shared, ${number(sequence.committed)} committed`),
      ...sequence.windows.flatMap((one) => fact(one.name, `${number(one.table.length)} blocks; ${number(one.dropped)} have left the window`)),
      ...(sequence.siblings.length ? fact("of the same request", make("span", {}, ...sequence.siblings.slice(0, 24).map((one) =>
        make("button", { "data-key": `sequence ${one}`, onclick: () => chooseSequence(one) }, String(one))))) : [])),
    make("h3", {}, "Block table", make("small", {}, " logical → physical")),
    ...blockStrip({ table, counts, keyed, tokens, size }, (block) => chooseBlock(sequence.tier, block)),
    make("h3", {}, "Explanation"),
    make("p", { class: "explain" }, sequence.explain),
  ];
}

export function emptyPanel() {
  return [
    make("h2", {}, "Details"),
    make("p", { class: "none" }, "Click a block, or a sequence in the list below. With the keyboard: Tab into the grid, arrow keys, Enter; Escape clears the selection."),
    make("dl", { class: "meanings" }, ...LEGEND.flatMap(([style, name, title]) => [
      make("dt", {}, make("i", { class: `swatch sign ${style}` }), name), make("dd", {}, title)])),
  ];
}

export function eventLine(event) {
  return make("li", { value: event.event }, make("small", {}, event.step ? `step ${event.step}` : ""), make("span", {}, ...textWithId(event.text, event.request)));
}

const fact = (name, value) => [make("dt", {}, name), make("dd", {}, value)];

function fillBar(tokens, size) {
  return make("span", { class: "fill" }, level(tokens / size), make("small", {}, `${tokens}/${size}`));
}
