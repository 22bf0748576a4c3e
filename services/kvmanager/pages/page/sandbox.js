// The sandbox: a pool operated by hand. The server runs the operations; this page shows the results.

import { counted, drawBar, find, make, number, sync } from "./dom.js";
import { ask, send } from "./feed.js";

const PLAY_MS = 1400;
// The last is apart: the others store each sequence for itself, whether it has blocks or a slab.
const POLICIES = [
  ["paged", "Paged", "blocks on demand"],
  ["exact", "Exact", "one slab of the final length, known in advance (Orca Oracle)"],
  ["pow2", "Power of two", "the next power of two above the final length (Orca Pow2)"],
  ["max", "Maximum length", "one slab of the maximum length (Orca Max)"],
  ["shared", "Paged, with sharing", "what the pool above does: common blocks are stored once"],
];
const KEY = "quire-sandbox";

let name = null;
let state = null;
let chosen = 0; // a sequence
let playing = 0;
let turn = Promise.resolve(); // one request at a time

function say(kind, text) {
  find("#status").className = document.documentElement.dataset.state = kind;
  find("#status span").textContent = text;
}

async function begin() {
  const size = Number(find("#size").value);
  show(await send("/api/sandbox", { block_size: size }));
}

// Sends a request and shows the response; creates a new sandbox if this one does not exist any more.
function act(path, body) {
  turn = turn.then(async () => {
    try {
      show(await send(`/api/sandbox/${name}${path}`, body));
    } catch (error) {
      stop();
      if (error.message.includes("does not exist any more")) await begin().catch(() => say("away", "the KV manager is not reachable"));
      else say("away", error instanceof TypeError ? "the KV manager is not reachable" : error.message);
    }
  });
  return turn;
}

const operate = (operation, more = {}) => act("/operations", { operation, ...more });

function show(next) {
  const before = state && state.name === next.name ? state : null;
  state = next;
  name = next.name;
  sessionStorage.setItem(KEY, name);
  find("#size").value = state.block_size;
  find("#new input").max = state.longest;
  if (!state.sequences.some((one) => one.sequence === chosen)) chosen = 0;
  document.documentElement.dataset.operation = state.log.length;
  showBlocks(before);
  showSequences();
  showPolicies();
  showLog();
  find("#undo").disabled = !state.undoable;
  const { stage, stages } = state.beam;
  find("#beam").textContent = stage ? `beam search: step ${stage + 1} of ${stages}` : "beam search: first step";
  say("live", "ready");
}

function showBlocks(before) {
  const { counts } = state;
  const table = new Set(state.sequences.find((one) => one.sequence === chosen)?.table);
  sync(find("#pool64"), state.blocks, () => make("button", { onclick: (event) => chooseHolder(Number(event.currentTarget.dataset.block)) },
    make("span", { class: "ink" }), make("b"), make("i")), (element, block, index) => {
    const old = before?.blocks[index];
    const fresh = old && (old.count !== block.count || old.state !== block.state || old.fill !== block.fill);
    const many = block.count > 1 ? "shared" : "";
    const marks = table.size ? (table.has(block.block) ? "chosen" : "dim") : "";
    element.className = [block.state, many, marks].filter(Boolean).join(" ");
    if (fresh) {
      void element.offsetWidth; // restarts the animation
      element.classList.add("fresh");
    }
    element.dataset.block = block.block;
    element.title = `block ${block.block}: ${block.state}, count ${block.count}${block.keyed ? ", has a key" : ""}${block.state === "free" ? "" : `, ${block.fill} of ${state.block_size} tokens`}${block.holders.length ? `, of sequence ${block.holders.join(", ")}` : ""}`;
    element.setAttribute("aria-label", element.title);
    element.children[0].style.height = `${block.state === "free" ? 0 : (100 * block.fill) / state.block_size}%`;
    element.children[1].textContent = block.block;
    element.children[2].textContent = block.count > 1 ? `×${block.count}` : block.state === "cached" ? "•" : "";
  });
  find("#blocks-note").textContent = `block size ${state.block_size}; the coloured height shows the fill, ×n the reference count, • cached blocks`;
  drawBar(find("#blocks-bar"), [
    { name: "held by one", value: counts.held - counts.shared, style: "held" },
    { name: "shared", value: counts.shared, style: "shared" },
    { name: "cached", value: counts.cached, style: "cached" },
    { name: "free", value: counts.free, style: "free" },
  ], state.blocks.length);
}

// A click on a block selects its first holder; a further click, the next one.
function chooseHolder(block) {
  const { holders } = state.blocks[block - 1];
  chosen = holders.length ? holders[(holders.indexOf(chosen) + 1) % holders.length] : 0;
  showBlocks(state);
  showSequences();
}

function showSequences() {
  const cards = find("#cards");
  if (!state.sequences.length) {
    cards.replaceChildren(make("p", { class: "none" }, "None yet. Create a new sequence, fork it, and append to the fork."));
    return;
  }
  cards.replaceChildren(...state.sequences.map(card));
}

function card(one) {
  const id = one.sequence, size = state.block_size;
  const amount = make("input", { type: "number", min: 1, max: state.longest, value: find(`#append-${id}`)?.value || 1, id: `append-${id}`, "aria-label": `Tokens to append to sequence ${id}` });
  const button = (text, title, action) => make("button", { title, onclick: action, "data-do": `${text} ${id}` }, text);
  return make("article", { class: `sequence${id === chosen ? " chosen" : ""}`, "data-sequence": id },
    make("div", { class: "top" },
      make("b", {}, `Sequence ${id}`, make("small", {}, ` ${counted(one.tokens, "token")}${one.parent ? `, forked from ${one.parent}` : ""}`)),
      button("append", "Append this number of tokens", () => operate("append", { sequence: id, tokens: Number(amount.value) || 1 })), amount,
      button("fork", "Fork: add a sequence that shares all blocks", () => operate("fork", { sequence: id })),
      button("write to last block", "Rewrite the last token", () => operate("write", { sequence: id })),
      button("free", "Free the sequence", () => operate("free", { sequence: id }))),
    make("ol", { class: "table" }, ...one.table.map((block, index) => {
      const fill = Math.min(size, one.tokens - index * size);
      const count = state.blocks[block - 1].count;
      const words = one.words.slice(index * size, (index + 1) * size).filter(Boolean).join(" ");
      const inner = make("span");
      inner.style.width = `${(100 * fill) / size}%`;
      return make("li", { class: count > 1 ? "shared" : "", title: `logical block ${index} → physical block ${block}, ${fill} of ${size} tokens, count ${count}` },
        make("span", {}, make("small", {}, `${index} → `), make("b", {}, String(block)), count > 1 ? make("small", {}, ` ×${count}`) : ""),
        make("span", { class: "level" }, inner), words ? make("span", { class: "words" }, words) : "");
    })));
}

function showPolicies() {
  find("#slots").textContent = number(state.slots);
  const { slots } = state, rows = { ...state.contiguous, ...pagedRows() };
  sync(find("#policies"), POLICIES, () => make("div", { class: "policy" }, make("div", {}, make("h3"), make("small"), make("p", {}, make("b", { class: "share" }), make("small"))), make("div", {}, make("div", { class: "bar" }), make("small", { class: "note" }))), (element, [kind, title, meaning]) => {
    const row = rows[kind];
    element.classList.toggle("paged", kind === "paged");
    element.classList.toggle("apart", kind === "shared");
    element.dataset.policy = kind;
    const [head, body] = element.children;
    head.children[0].textContent = title;
    head.children[1].textContent = meaning;
    [head.children[2].children[0].textContent, head.children[2].children[1].textContent] = headline(kind, row, rows.paged);
    drawBar(body.children[0], [
      { name: "used", value: row.used, style: "held", title: "Slots that hold tokens" },
      { name: "reserved", value: row.reserved, style: "reserved", title: "Slots that will hold tokens of the same sequence" },
      { name: "internal", value: row.internal, style: "internal", title: "Slots that are never used: internal fragmentation" },
      { name: "external", value: row.external, style: "external", title: "Free slots in holes that are too small for the next slab" },
      { name: "free", value: row.free, style: "free" },
    ], slots);
    body.children[1].textContent = note(kind, row);
  });
}

// The slots of all sequences, each with blocks of its own; and those of the pool, in which sequences share blocks.
function pagedRows() {
  const { paged, slots, counts, block_size: size } = state;
  const used = state.sequences.reduce((sum, one) => sum + one.tokens, 0);
  const taken = state.sequences.reduce((sum, one) => sum + one.table.length * size, 0);
  return {
    paged: { used, reserved: 0, internal: taken - used, external: 0, free: Math.max(0, slots - taken), over: taken - slots },
    shared: { used: paged.tokens, reserved: paged.reserved, internal: paged.internal + paged.lookahead, external: 0, free: (counts.free + counts.cached) * size },
  };
}

const takenBy = (row) => row.used + row.reserved + row.internal + row.external;
const percent = (part, whole) => `${((100 * part) / whole).toFixed(1)} %`;

// Tokens stored for slots used, on the same basis for all; of sharing, the slots that it saves.
function headline(kind, row, alone) {
  if (kind !== "shared") return takenBy(row) ? [percent(row.used, takenBy(row)), `${counted(row.used, "token")} in ${counted(takenBy(row), "slot")}`] : ["–", "no tokens yet"];
  const all = takenBy(alone);
  return all ? [percent(all - takenBy(row), all), `fewer slots: ${number(takenBy(row))} instead of ${number(all)}`] : ["–", "no tokens yet"];
}

function note(kind, row) {
  if (kind === "shared") return state.counts.saved ? `${counted(state.counts.saved, "block")} saved` : "nothing is shared now";
  if (row.over > 0) return `${counted(row.over, "slot")} more than there are: without sharing, sequences would wait`;
  return row.waiting ? `${counted(row.waiting, "sequence")} would wait for memory` : "";
}

function showLog() {
  const log = find("#log");
  log.replaceChildren(...state.log.map((line) => make("li", { class: line.refused ? "refused" : "" }, make("small", {}, String(line.operation)), make("span", {}, line.text))).reverse());
}

function stop() {
  clearInterval(playing);
  playing = 0;
  find("#play").textContent = "play all";
}

find("#new").addEventListener("submit", (event) => {
  event.preventDefault();
  operate("new", { tokens: Number(event.target.tokens.value) || 1 });
});
find("#text").addEventListener("submit", (event) => {
  event.preventDefault();
  operate("new", { text: event.target.text.value });
});
find("#beam").addEventListener("click", () => operate("beam"));
find("#play").addEventListener("click", () => {
  if (playing) return stop();
  find("#play").textContent = "stop";
  const step = () => operate("beam").then(() => state.beam.stage === 0 && stop());
  playing = setInterval(step, PLAY_MS);
  return step();
});
find("#undo").addEventListener("click", () => act("/undo"));
find("#reset").addEventListener("click", () => act("/reset"));
find("#size").addEventListener("change", () => {
  stop();
  chosen = 0;
  turn = turn.then(begin).catch(() => say("away", "the KV manager is not reachable"));
});

// After a reload, the page continues with its sandbox, if it still exists.
const kept = sessionStorage.getItem(KEY);
turn = (kept ? ask(`/api/sandbox/${kept}`).then(show, begin) : begin()).catch(() => say("away", "the KV manager is not reachable"));
