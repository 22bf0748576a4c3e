// The rows of the sequences. A row keeps its place while its sequence lives: a new sequence takes the place of an ended
// one or the end of the list, so that no row moves under a pointer, and focus stays with its sequence.

import { make, number } from "./dom.js";
import { copyButton, idText, shortened } from "./ids.js";

const MAX_ENDED = 12; // more than live ones; then they are removed

export class SequenceRows {
  constructor(body, onChoose) {
    this.body = body;
    this.onChoose = onChoose;
    this.chosen = 0;
  }

  // Shows sequences, the newest first.
  show(sequences) {
    const news = new Map(sequences.map((one) => [one.sequence, one]));
    for (const row of this.body.children) {
      const one = news.get(Number(row.dataset.sequence));
      if (one) this.fill(row, one);
      else this.end(row);
      news.delete(Number(row.dataset.sequence));
    }
    const vacant = this.ended().filter((row) => !this.isKept(row));
    for (const one of [...news.values()].reverse()) this.fill(this.prepared(vacant.shift(), one), one);
    if (this.ended().length > sequences.length + MAX_ENDED) for (const row of vacant) row.remove();
    for (let last; (last = this.body.lastElementChild) && last.classList.contains("ended") && !this.isKept(last); ) last.remove();
  }

  choose(sequence) {
    this.chosen = sequence;
    for (const row of this.body.children) this.mark(row);
  }

  ended() {
    return [...this.body.querySelectorAll("tr.ended")];
  }

  // Rows in use are not given away.
  isKept(row) {
    return row.contains(document.activeElement) || row.matches(":hover") || Number(row.dataset.sequence) === this.chosen;
  }

  prepared(vacant, one) {
    const id = one.sequence;
    const row = make("tr", { "data-sequence": id, onclick: () => this.onChoose(id) },
      make("td", {}, make("button", { "aria-pressed": "false", "aria-label": `Sequence ${id} of request ${one.request}` }, String(id))),
      make("td", {}, make("span", { class: "copied" }, idText(one.request), shortened(one.request) === one.request ? "" : copyButton("request", one.request))),
      make("td"), make("td"));
    if (vacant) vacant.replaceWith(row);
    else this.body.append(row);
    return row;
  }

  fill(row, one) {
    row.classList.remove("ended");
    row.children[2].textContent = number(one.blocks) + (one.tier === "host" ? " host" : "");
    row.children[3].textContent = number(one.tokens);
    this.mark(row);
  }

  end(row) {
    row.classList.add("ended");
    row.children[2].textContent = "ended";
    row.children[3].textContent = "";
  }

  mark(row) {
    const chosen = Number(row.dataset.sequence) === this.chosen;
    row.classList.toggle("chosen", chosen);
    row.querySelector("button").setAttribute("aria-pressed", chosen);
  }
}
