// What the page says of one block, or of one sequence.

import { counted, make, number } from "./dom.js";

const MOST_ENTRIES = 400;

const STATES = { free: "Nobody holds it, and it has no contents that could be found.", cached: "Nobody holds it, but its contents can be found by their key until the space is needed.", held: "", withheld: "The audit took it out of circulation." };

export function blockPanel(block, choose) {
  const { holders, pins } = block;
  return [
    make("h2", {}, `Block ${block.block}`, make("small", {}, ` ${block.tier} memory`)),
    make("p", { class: "chips" },
      make("span", { class: `chip ${block.count > 1 ? "shared2" : block.state}` }, block.count > 1 ? "shared" : block.state),
      make("span", {}, `reference count ${block.count}`),
      pins ? make("span", {}, counted(pins, "pin")) : ""),
    STATES[block.state] ? make("p", {}, STATES[block.state]) : "",
    make("h3", {}, "Table entries"),
    holders.length
      ? make("ul", { class: "holders" }, ...holders.map((holder) => make("li", {},
          make("button", { onclick: () => choose(holder.sequence) }, `sequence ${holder.sequence}`),
          make("span", {}, `${holder.request} · logical block ${holder.logical}`),
          fillBar(holder.tokens, block.block_size))))
      : make("p", { class: "none" }, pins ? "Only a pin holds it." : "None."),
    make("h3", {}, "Key"),
    block.key ? make("p", { class: "key" }, block.key) : make("p", { class: "none" }, "None: it is not full, or its tokens are not computed."),
    make("h3", {}, "Last events"),
    block.events.length ? make("ol", { class: "told" }, ...block.events.map(eventLine)) : make("p", { class: "none" }, "None that are kept."),
  ];
}

export function sequencePanel(sequence, chooseBlock, chooseSequence) {
  const { table, counts, keyed, tokens, block_size: size } = sequence;
  const shared = counts.filter((count) => count > 1).length;
  return [
    make("h2", {}, `Sequence ${sequence.sequence}`, make("small", {}, ` request ${sequence.request}`)),
    make("dl", { class: "facts" },
      ...fact("tokens computed", `${number(tokens)} of room for ${number(sequence.room)}`),
      ...fact("blocks", `${number(table.length)} in ${sequence.tier} memory, ${number(shared)} shared, ${number(sequence.committed)} keyed as its own prefix`),
      ...(sequence.siblings.length ? fact("of the same request", make("span", {}, ...sequence.siblings.slice(0, 24).map((one) =>
        make("button", { onclick: () => chooseSequence(one) }, String(one))))) : [])),
    make("h3", {}, "Block table", make("small", {}, " logical → physical")),
    make("ol", { class: "strip" }, ...table.slice(0, MOST_ENTRIES).map((block, index) => {
      const fill = Math.max(0, Math.min(size, tokens - index * size));
      const count = counts[index];
      const title = `logical ${index} → block ${block}: ${fill} of ${size} tokens${count > 1 ? `, held ${count} times` : ""}${keyed[index] ? ", has a key" : ""}`;
      return make("li", {}, make("button", { title, class: count > 1 ? "shared" : "", onclick: () => chooseBlock(sequence.tier, block) },
        make("small", {}, String(index)), make("b", {}, String(block)), level(fill / size), count > 1 ? make("i", {}, `×${count}`) : ""));
    })),
    table.length > MOST_ENTRIES ? make("p", { class: "none" }, `and ${number(table.length - MOST_ENTRIES)} more`) : "",
    make("h3", {}, "What happened to it"),
    make("p", { class: "explain" }, sequence.explain),
  ];
}

export function emptyPanel() {
  return [
    make("h2", {}, "Details"),
    make("p", { class: "none" }, "Click a block, or a sequence of the list below. With the keyboard: Tab into the grid, arrow keys, Enter; Escape ends a selection."),
  ];
}

export function eventLine(event) {
  return make("li", { value: event.event }, make("small", {}, event.step ? `step ${event.step}` : ""), make("span", {}, event.text));
}

const fact = (name, value) => [make("dt", {}, name), make("dd", {}, value)];

function level(share) {
  const inner = make("span");
  inner.style.width = `${100 * share}%`;
  return make("span", { class: "level" }, inner);
}

function fillBar(tokens, size) {
  return make("span", { class: "fill" }, level(tokens / size), make("small", {}, `${tokens}/${size}`));
}
