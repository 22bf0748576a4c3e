// A sequence's block table as a strip of cells: logical index, physical block, fill level, number of holders.

import { make, number } from "./dom.js";

const MAX_ENTRIES = 400;

// `table` begins at logical block `first`; `keyed` may be missing. Returns the elements.
export function blockStrip({ table, counts, keyed = [], tokens, size, first = 0 }, onChoose) {
  const shown = table.slice(0, MAX_ENTRIES), left = table.length - shown.length;
  return [
    first ? make("p", { class: "none" }, `${number(first)} before these`) : "",
    make("ol", { class: "strip" }, ...shown.map((block, at) => {
      const index = first + at, count = counts[at];
      const fill = Math.max(0, Math.min(size, tokens - index * size));
      const title = `logical ${index} → block ${block}: ${fill} of ${size} tokens${count > 1 ? `, held ${count} times` : ""}${keyed[at] ? ", has a key" : ""}`;
      return make("li", {}, make("button", { title, type: "button", "data-key": `block ${block}`, class: count > 1 ? "shared" : "", onclick: () => onChoose(block) },
        make("small", {}, String(index)), make("b", {}, String(block)), level(fill / size), count > 1 ? make("i", {}, `×${count}`) : ""));
    })),
    left > 0 ? make("p", { class: "none" }, `and ${number(left)} more`) : "",
  ];
}

export function level(share) {
  const inner = make("span");
  inner.style.width = `${100 * share}%`;
  return make("span", { class: "level" }, inner);
}
