// Decodes the numbers of a map, see kvmanager/observe/block_map.py.

export const FREE = 0, CACHED = 1, HELD = 2, WITHHELD = 3;
export const STATES = ["free", "cached", "held", "withheld"];

export const stateOf = (cell) => cell & 3;
export const isKeyed = (cell) => (cell & 4) !== 0;
export const isPinned = (cell) => (cell & 8) !== 0;
export const isOutlived = (cell) => (cell & 16) !== 0;
export const countOf = (cell) => (cell >>> 8) & 255;
export const ownerOf = (cell) => cell >>> 16;

// Decodes base64 of little-endian 32-bit numbers.
export function decoded(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Uint32Array.from({ length: bytes.length / 4 }, (_, index) => view.getUint32(4 * index, true));
}

// Counts the blocks in each state, and the shared ones.
export function tally(cells) {
  const counts = { free: 0, cached: 0, held: 0, withheld: 0, shared: 0, saved: 0 };
  for (let block = 1; block < cells.length; block++) {
    counts[STATES[stateOf(cells[block])]]++;
    const count = countOf(cells[block]);
    if (count > 1) {
      counts.shared++;
      counts.saved += count - 1;
    }
  }
  return counts;
}

export function describe(block, cell, tier) {
  const count = countOf(cell);
  const parts = [`Block ${block}${tier.startsWith("host") ? " (host)" : ""}`, STATES[stateOf(cell)]];
  if (count > 1) parts.push(`shared, reference count ${count === 255 ? "255 or more" : count}`);
  if (count === 1 && ownerOf(cell)) parts.push(`sequence ${ownerOf(cell)}`);
  if (stateOf(cell) === HELD) parts.push(isKeyed(cell) ? "full, has a key" : "partially filled");
  if (isPinned(cell)) parts.push("pinned");
  if (isOutlived(cell)) parts.push("computed before the engine's last start");
  return parts.join(" · ");
}
