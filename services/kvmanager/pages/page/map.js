// The live block map.

import { STATES, decoded, tally } from "./cells.js";
import { drawBar, find, make, number } from "./dom.js";
import { Feed, ask } from "./feed.js";
import { BlockGrid } from "./grid.js";
import { idWithCopy, shortened } from "./ids.js";
import { LEGEND, blockPanel, emptyPanel, eventLine, sequencePanel } from "./panel.js";
import { SequenceRows } from "./rows.js";

const MAX_EVENTS = 200;
const MAX_LISTED = 500; // the server's bound
const REFRESH_MS = 1000;

let pool = null;
let slots = null;
let selection = null; // { tier, block } or { sequence }
let paused = false;
let stale = false;
let shown = null; // the selection that the panel shows

const rows = new SequenceRows(find("#sequences"), chooseSequence);
const spoken = find("#spoken");
// By the name of their figure: a tier, and behind "-" the number of a window kind.
const grids = {};
const addGrid = (name) => (grids[name] = new BlockGrid(find(`#${name}`), find("#tip"), spoken, chooseBlock));
["device", "host"].forEach(addGrid);

const api = (rest) => `/api/pools/${encodeURIComponent(pool.engine)}/${rest}`;

const handlers = {
  pools(pools) {
    const names = pools.map((one) => one.engine);
    const choice = find("#pool");
    if (names.join("\n") !== [...choice.options].map((option) => option.value).join("\n"))
      choice.replaceChildren(...names.map((name) => make("option", { value: name, title: name }, shortened(name))));
  },
  pool(message) {
    pool = message;
    slots = message.slots;
    find("#pool").value = pool.engine;
    find("#meta").textContent = [pool.model, `block size ${pool.block_size}`].filter(Boolean).join(" · ");
    find("#host").hidden = !pool.host_blocks;
    find("#grids").classList.toggle("two", pool.host_blocks > 0);
    showBands();
    showCounts(pool.counts);
    showSlots();
  },
  drawn(maps) {
    for (const name of Object.keys(grids)) grids[name].show(maps[name]);
    stale = true;
  },
  changes(changes) {
    if (changes.counts) showCounts(changes.counts);
    if (changes.slots) {
      slots = changes.slots;
      showSlots();
    }
    for (const name of Object.keys(grids)) if (changes[name]) grids[name].change(decoded(changes[name]));
    if (changes.events && !paused) showEvents(changes.events);
    stale = true;
  },
  state(kind, text) {
    const status = find("#status");
    status.className = document.documentElement.dataset.state = kind;
    find("span", status).textContent = text;
    find("#waiting").hidden = kind === "live" || pool !== null;
    if (!find("#waiting").hidden) showWaiting(kind, text);
    document.body.classList.toggle("stale", kind !== "live");
    refresh();
  },
};

// Gives each window kind a band of its own below kind 0, for each tier that has blocks of it.
function showBands() {
  for (const name of Object.keys(grids).filter((one) => one.includes("-"))) {
    find(`#${name}`).remove();
    delete grids[name];
  }
  for (const [index, kind] of pool.kinds.entries())
    for (const tier of ["device", "host"].filter((one) => kind[`${one}_blocks`])) {
      const band = find(`#${tier}`).cloneNode(true);
      band.id = `${tier}-${index + 1}`;
      band.hidden = false;
      band.classList.add("window");
      find("figcaption", band).firstChild.textContent = `${kind.name}, ${tier} memory `;
      find("canvas", band).setAttribute("aria-label", `Blocks of kind ${kind.name} in ${tier} memory. Arrow keys move, Enter shows a block.`);
      find("#waiting").before(band);
      addGrid(band.id);
    }
}

// Tier and kind of the blocks that a grid shows, as the service names them.
function blocksOf(name) {
  const [tier, number] = name.split("-");
  return { tier, kind: number ? pool.kinds[number - 1].name : "" };
}

// What to do while there is no pool.
function showWaiting(kind, text) {
  if (find("#waiting").dataset.text === text) return; // a button in it may have the focus
  find("#waiting").dataset.text = text;
  const commands = [
    ["With all services, on one machine:", "quire serve"],
    ["Or an engine for this KV manager:", `quire engine --kvmanager ${location.hostname}:%KVMANAGER_PORT%`],
  ];
  find("#waiting").replaceChildren(make("p", {}, `${text[0].toUpperCase()}${text.slice(1)}.`),
    ...(kind === "waiting" ? commands.flatMap(([when, one]) => [make("p", {}, when), command(one)]) : []),
    make("p", {}, "This page connects by itself."));
}

const command = (text) => make("p", { class: "command" }, idWithCopy("command", text, text.length));

function showCounts(counts) {
  pool.counts = counts;
  const { free, cached, held, withheld } = counts.device;
  drawBar(find("#blocks-bar"), [
    { name: "held by one", value: held - counts.shared, style: "held", title: "Blocks with one holder: a table entry or a pin" },
    { name: "shared", value: counts.shared, style: "shared", title: "Blocks with several holders, stored once" },
    { name: "cached", value: cached, style: "cached", title: "Blocks without a holder, whose contents can be hit" },
    { name: "free", value: free, style: "free", title: "Blocks without a holder and without contents" },
    { name: "withheld", value: withheld, style: "withheld", title: "Taken out of circulation because of a fault", quiet: true },
  ], pool.device_blocks, pool.device_blocks);
  find("#blocks-total").textContent = `${number(pool.device_blocks)} in all`;
  find("#device small").textContent = `${number(pool.device_blocks)} blocks, ${number(free + cached)} available`;
  if (pool.host_blocks) {
    const host = counts.host;
    find("#host small").textContent = `${number(pool.host_blocks)} blocks: ${STATES.filter((state) => host[state]).map((state) => `${number(host[state])} ${state}`).join(", ")}`;
  }
  for (const [index, kind] of counts.kinds.entries())
    for (const tier of ["device", "host"].filter((one) => grids[`${one}-${index + 1}`])) {
      const of = kind[tier];
      find(`#${tier}-${index + 1} small`).textContent = STATES.filter((state) => of[state]).map((state) => `${number(of[state])} ${state}`).join(", ");
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
  ], total, pool.device_blocks * pool.block_size);
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
  rows.show(sequences);
  find("#idle").hidden = sequences.length > 0;
  find("#sequences-more").textContent = sequences.length >= MAX_LISTED ? `the latest ${sequences.length}` : "";
}

async function showSelection() {
  const wanted = selection;
  const reveal = wanted !== shown; // later the reader may scroll away
  if (!wanted) {
    shown = null;
    find("#panel").className = find("#panel").dataset.sequence = find("#panel").dataset.block = "";
    return find("#panel").replaceChildren(...emptyPanel());
  }
  let children;
  try {
    if (wanted.sequence) {
      const sequence = await ask(api(`sequences/${wanted.sequence}`));
      if (wanted !== selection) return;
      if (!sequence.live) return showEnded(wanted.sequence);
      for (const [name, grid] of Object.entries(grids)) {
        const { tier, kind } = blocksOf(name), own = kind ? sequence.windows.find((one) => one.name === kind) : sequence;
        grid.mark(tier === sequence.tier ? own.table : [], 0, reveal);
      }
      children = sequencePanel(sequence, chooseBlock, chooseSequence);
    } else {
      const block = await ask(api(`blocks/${wanted.block}?${new URLSearchParams(blocksOf(wanted.tier))}`));
      if (wanted !== selection) return;
      for (const [tier, grid] of Object.entries(grids)) grid.mark([], tier === wanted.tier ? wanted.block : 0, reveal);
      children = blockPanel(block, chooseSequence);
    }
  } catch (error) {
    if (wanted !== selection) return;
    children = [make("h2", {}, "Details"), make("p", { class: "none" }, `${error.message}.`)];
  }
  const panel = find("#panel");
  if (panel.matches(":active")) return (stale = true); // replacing a pressed button would lose the click
  const focused = panel.contains(document.activeElement) ? document.activeElement.dataset.key || "" : null;
  const top = wanted === shown ? panel.scrollTop : 0;
  shown = wanted;
  panel.classList.remove("over");
  panel.dataset.sequence = wanted.sequence || "";
  panel.dataset.block = wanted.block || "";
  panel.replaceChildren(closeButton(), ...children.filter((child) => child !== ""));
  panel.scrollTop = top;
  if (focused !== null) (panel.querySelector(`[data-key="${CSS.escape(focused)}"]`) || panel).focus({ preventScroll: true });
}

// The last details stay visible.
function showEnded(sequence) {
  for (const grid of Object.values(grids)) grid.mark([]);
  const panel = find("#panel");
  if (panel.dataset.sequence !== String(sequence)) panel.replaceChildren(closeButton(), make("h2", {}, `Sequence ${sequence}`));
  if (!panel.classList.contains("over")) find("h2", panel).append(make("small", {}, " has ended"));
  panel.classList.add("over");
}

const closeButton = () => make("button", { class: "close", "data-key": "close", "aria-label": "Clear the selection", onclick: () => choose(null) }, "×");

function choose(wanted) {
  selection = wanted;
  if (!wanted) for (const grid of Object.values(grids)) grid.mark([]);
  rows.choose(wanted?.sequence || 0);
  return showSelection();
}

function chooseBlock(tier, block) {
  choose(block ? { tier, block } : null);
}

function chooseSequence(sequence) {
  choose({ sequence });
}

find("#legend").replaceChildren(...LEGEND.map(([style, name, title]) => make("li", { title }, make("i", { class: `swatch sign ${style}` }), name)));
find("#idle").replaceChildren(make("p", {}, "No request is running. Start one:"), command("quire generate \"Once upon a time\""));
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
