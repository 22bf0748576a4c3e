// The stream of one pool: the whole map, then what changes. It comes again by itself when it breaks.

import { decoded } from "./cells.js";

const AGAIN_MS = 1000;

export class Feed {
  // `hear` has a method for each kind of news: pool, drawn, changes, state.
  constructor(hear) {
    this.hear = hear;
    this.engine = null;
    this.source = null;
    this.seek();
  }

  // Asks which pools there are until there is the one that is wanted, or any.
  async seek() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
    try {
      const pools = (await ask("/api/pools")).pools;
      this.hear.pools(pools);
      const wanted = pools.find((pool) => pool.engine === this.engine) || (this.fixed ? undefined : pools[0]);
      if (wanted) return this.follow(wanted.engine);
      this.hear.state("waiting", this.engine ? `engine ${this.engine} is not attached` : "no engine is attached yet");
    } catch {
      this.hear.state("away", "the KV manager does not answer");
    }
    this.timer = setTimeout(() => this.seek(), AGAIN_MS);
  }

  choose(engine) {
    this.engine = engine;
    this.fixed = true;
    this.seek();
  }

  follow(engine) {
    this.engine = engine;
    const source = (this.source = new EventSource(`/api/pools/${encodeURIComponent(engine)}/live`));
    let maps = {};
    source.addEventListener("pool", (event) => {
      const pool = JSON.parse(event.data);
      maps = { device: new Uint32Array(pool.device_blocks + 1), host: new Uint32Array(pool.host_blocks + 1) };
      this.hear.pool(pool);
    });
    source.addEventListener("cells", (event) => {
      const page = JSON.parse(event.data);
      maps[page.tier].set(decoded(page.cells), page.first);
    });
    source.addEventListener("drawn", () => {
      this.hear.drawn(maps);
      this.hear.state("live", "live");
    });
    source.addEventListener("changes", (event) => this.hear.changes(JSON.parse(event.data)));
    source.addEventListener("gone", () => this.lost("waiting", "the engine has left"));
    source.addEventListener("error", () => this.lost("away", "the connection broke"));
  }

  lost(state, text) {
    this.hear.state(state, text);
    this.source?.close();
    this.source = null;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.seek(), AGAIN_MS / 2);
  }
}

export async function ask(path, options) {
  const answer = await fetch(path, options);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error?.message || answer.statusText);
  return body;
}

export const send = (path, body = {}) =>
  ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
