// The live block map.

import { STATES, decoded, tally } from "./cells.js";
import { drawBar, find, make, number, sync } from "./dom.js";
import { Feed, ask } from "./feed.js";
import { BlockGrid } from "./grid.js";
import { blockPanel, emptyPanel, eventLine, sequencePanel } from "./panel.js";

const MAX_EVENTS = 200;
const REFRESH_MS = 1000;

const LEGEND = [
  ["free", "free"], ["cached", "cached"], ["held", "held by one"], ["shared2", "by 2"], ["shared3", "by 3–4"],
  ["shared5", "by 5+"], ["withheld", "withheld"],
];

let pool = null;
let slots = null;
let selection = null; // { tier, block } or { sequence }
let paused = false;
let stale = false;

const spoken = find("#spoken");
const grids = Object.fromEntries(["device", "host"].map((tier) => [tier, new BlockGrid(find(`#${tier}`), find("#tip"), spoken, chooseBlock)]));

const api = (rest) => `/api/pools/${encodeURIComponent(pool.engine)}/${rest}`;

const handlers = {
  pools(pools) {
    const names = pools.map((one) => one.engine);
    const choice = find("#pool");
    if (names.join("\n") !== [...choice.options].map((option) => option.value).join("\n"))
      choice.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  },
  pool(message) {
    pool = message;
    slots = message.slots;
    find("#pool").value = pool.engine;
    find("#meta").textContent = [pool.model, `block size ${pool.block_size}`].filter(Boolean).join(" · ");
    find("#host").hidden = !pool.host_blocks;
    find("#grids").classList.toggle("two", pool.host_blocks > 0);
    showCounts(pool.counts);
    showSlots();
  },
  drawn(maps) {
    for (const tier of Object.keys(grids)) grids[tier].show(maps[tier]);
    stale = true;
  },
  changes(changes) {
    if (changes.counts) showCounts(changes.counts);
    if (changes.slots) {
      slots = changes.slots;
      showSlots();
    }
    for (const tier of Object.keys(grids)) if (changes[tier]) grids[tier].change(decoded(changes[tier]));
    if (changes.events && !paused) showEvents(changes.events);
    stale = true;
  },
  state(kind, text) {
    const status = find("#status");
    status.className = document.documentElement.dataset.state = kind;
    find("span", status).textContent = text;
    find("#waiting").hidden = kind === "live" || pool !== null;
    find("#waiting").textContent = `${text[0].toUpperCase()}${text.slice(1)}. This page reconnects automatically.`;
    document.body.classList.toggle("stale", kind !== "live");
    refresh();
  },
};


function showCounts(counts) {
  pool.counts = counts;
  const { free, cached, held, withheld } = counts.device;
  drawBar(find("#blocks-bar"), [
    { name: "held by one", value: held - counts.shared, style: "held", title: "Blocks with one holder: a table entry or a pin" },
    { name: "shared", value: counts.shared, style: "shared2", title: "Blocks with several holders, stored once" },
    { name: "cached", value: cached, style: "cached", title: "Blocks without a holder, whose contents can be hit" },
    { name: "free", value: free, style: "free", title: "Blocks without a holder and without contents" },
    { name: "withheld", value: withheld, style: "withheld", title: "Taken out of circulation by the audit", quiet: true },
  ], pool.device_blocks);
  find("#blocks-total").textContent = `${number(pool.device_blocks)} in all`;
  find("#device small").textContent = `${number(pool.device_blocks)} blocks, ${number(free + cached)} available`;
  if (pool.host_blocks) {
    const host = counts.host;
    find("#host small").textContent = `${number(pool.host_blocks)} blocks: ${STATES.filter((state) => host[state]).map((state) => `${number(host[state])} ${state}`).join(", ")}`;
  }
  for (const figure of document.querySelectorAll("[data-figure]")) figure.textContent = number(counts[figure.dataset.figure]);
  if (!counts.connected) handlers.state("waiting", "the engine is disconnected; its pool is kept until the lease expires");
}

function showSlots() {
  const total = slots.tokens + slots.reserved + slots.lookahead + slots.internal;
  drawBar(find("#slots-bar"), [
    { name: "tokens", value: slots.tokens, style: "held", title: "Slots with computed keys and values; slots of shared blocks count once" },
    { name: "reserved", value: slots.reserved, style: "reserved", title: "Slots that the running prefill will write" },
    { name: "lookahead", value: slots.lookahead, style: "lookahead", title: "Slots in blocks that were granted ahead" },
    { name: "internal", value: slots.internal, style: "internal", title: "Unused slots in partially filled blocks: internal fragmentation" },
  ], total);
  find("#slots-total").textContent = total ? `${(100 * slots.tokens / total).toFixed(1)} % hold tokens` : "none held";
}

function showEvents(events) {
  const list = find("#events");
  list.prepend(...events.map(eventLine).reverse());
  while (list.childElementCount > MAX_EVENTS) list.lastElementChild.remove();
}

// Details and lists are reloaded once a second while there are changes.
async function refresh() {
  if (!stale || document.hidden || document.documentElement.dataset.state !== "live") return;
  stale = false;
  await Promise.allSettled([showSequences(), showSelection()]);
}
setInterval(refresh, REFRESH_MS);

async function showSequences() {
  const { sequences } = await ask(api("sequences"));
  sync(find("#sequences"), sequences, () => make("tr", { onclick: (event) => chooseSequence(Number(event.currentTarget.dataset.sequence)) },
    make("td", {}, make("button")), make("td"), make("td"), make("td")), (row, one) => {
    row.dataset.sequence = one.sequence;
    row.classList.toggle("chosen", selection?.sequence === one.sequence);
    row.children[0].firstChild.textContent = one.sequence;
    row.children[1].textContent = one.request;
    row.children[2].textContent = number(one.blocks) + (one.tier === "host" ? " host" : "");
    row.children[3].textContent = number(one.tokens);
  });
  const more = pool.counts.sequences - sequences.length;
  find("#sequences-more").textContent = sequences.length ? (more > 0 ? `the latest ${sequences.length}` : "") : "none now";
}

async function showSelection() {
  const wanted = selection;
  if (!wanted) {
    find("#panel").className = find("#panel").dataset.sequence = find("#panel").dataset.block = "";
    return find("#panel").replaceChildren(...emptyPanel());
  }
  let children;
  try {
    if (wanted.sequence) {
      const sequence = await ask(api(`sequences/${wanted.sequence}`));
      if (wanted !== selection) return;
      if (!sequence.live) return showEnded(wanted.sequence);
      for (const [tier, grid] of Object.entries(grids)) grid.mark(tier === sequence.tier ? sequence.table : []);
      children = sequencePanel(sequence, chooseBlock, chooseSequence);
    } else {
      const block = await ask(api(`blocks/${wanted.block}?tier=${wanted.tier}`));
      if (wanted !== selection) return;
      for (const [tier, grid] of Object.entries(grids)) grid.mark([], tier === wanted.tier ? wanted.block : 0);
      children = blockPanel(block, chooseSequence);
    }
  } catch (error) {
    if (wanted !== selection) return;
    children = [make("h2", {}, "Details"), make("p", { class: "none" }, `${error.message}.`)];
  }
  const panel = find("#panel");
  if (panel.matches(":active")) return (stale = true); // replacing a pressed button would lose the click
  const focused = [...panel.querySelectorAll("button")].indexOf(document.activeElement);
  panel.classList.remove("over");
  panel.dataset.sequence = wanted.sequence || "";
  panel.dataset.block = wanted.block || "";
  panel.replaceChildren(closeButton(), ...children.filter((child) => child !== ""));
  if (focused >= 0) panel.querySelectorAll("button")[focused]?.focus();
}

// The last details stay visible.
function showEnded(sequence) {
  for (const grid of Object.values(grids)) grid.mark([]);
  const panel = find("#panel");
  if (panel.dataset.sequence !== String(sequence)) panel.replaceChildren(closeButton(), make("h2", {}, `Sequence ${sequence}`));
  if (!panel.classList.contains("over")) find("h2", panel).append(make("small", {}, " has ended"));
  panel.classList.add("over");
}

const closeButton = () => make("button", { class: "close", "aria-label": "Clear the selection", onclick: () => choose(null) }, "×");

function choose(wanted) {
  selection = wanted;
  if (!wanted) for (const grid of Object.values(grids)) grid.mark([]);
  for (const row of find("#sequences").children) row.classList.toggle("chosen", Number(row.dataset.sequence) === wanted?.sequence);
  return showSelection();
}

function chooseBlock(tier, block) {
  choose(block ? { tier, block } : null);
}

function chooseSequence(sequence) {
  choose({ sequence });
}

find("#legend").replaceChildren(...LEGEND.map(([style, name]) => make("li", {}, make("i", { class: `swatch ${style}` }), name)));
find("#pool").addEventListener("change", (event) => {
  choose(null);
  feed.choose(event.target.value);
});
for (const input of document.querySelectorAll("#colour input"))
  input.addEventListener("change", () => Object.values(grids).forEach((grid) => grid.setColour(input.value === "sequence")));
find("#zoom-in").addEventListener("click", () => Object.values(grids).forEach((grid) => grid.zoomBy(1)));
find("#zoom-out").addEventListener("click", () => Object.values(grids).forEach((grid) => grid.zoomBy(-1)));
find("#zoom-fit").addEventListener("click", () => Object.values(grids).forEach((grid) => grid.zoomToFit()));
find("#pause").addEventListener("click", (event) => {
  paused = !paused;
  event.target.setAttribute("aria-pressed", paused);
  event.target.textContent = paused ? "resume" : "pause";
});
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey) return;
  if (event.key === "Escape") choose(null);
  if (event.key === "+") find("#zoom-in").click();
  if (event.key === "-") find("#zoom-out").click();
  if (event.key === "0") find("#zoom-fit").click();
});

showSelection();
const feed = new Feed(handlers);
// Keeps the list of pools up to date.
setInterval(() => document.hidden || ask("/api/pools").then((body) => handlers.pools(body.pools), () => {}), 5000);

// For tests that compare the drawn map with the KV manager's counts.
window.blockMap = { grids, tally: (tier) => tally(grids[tier].cells), get pool() { return pool; } };
