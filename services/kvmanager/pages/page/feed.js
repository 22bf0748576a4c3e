// The event stream of one pool: the whole map, then its changes. It reconnects when the connection is lost.

import { decoded } from "./cells.js";

const RETRY_MS = 1000;

export class Feed {
  // `handlers` has a method for each kind of message: pools, pool, drawn, changes, state.
  constructor(handlers) {
    this.handlers = handlers;
    this.engine = null;
    this.source = null;
    this.findPool();
  }

  // Polls the list of pools until it has the chosen one, or any if none was chosen.
  async findPool() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
    try {
      const pools = (await ask("/api/pools")).pools;
      this.handlers.pools(pools);
      const wanted = pools.find((pool) => pool.engine === this.engine) || (this.fixed ? undefined : pools[0]);
      if (wanted) return this.follow(wanted.engine);
      this.handlers.state("waiting", this.engine ? `engine ${this.engine} is not attached` : "no engine is attached yet");
    } catch {
      this.handlers.state("away", "the KV manager is not reachable");
    }
    this.timer = setTimeout(() => this.findPool(), RETRY_MS);
  }

  choose(engine) {
    this.engine = engine;
    this.fixed = true;
    this.findPool();
  }

  follow(engine) {
    this.engine = engine;
    const source = (this.source = new EventSource(`/api/pools/${encodeURIComponent(engine)}/live`));
    let maps = {};
    source.addEventListener("pool", (event) => {
      const pool = JSON.parse(event.data);
      maps = {};
      for (const [kind, of] of [pool, ...pool.kinds].entries())
        for (const tier of ["device", "host"]) maps[kind ? `${tier}-${kind}` : tier] = new Uint32Array(of[`${tier}_blocks`] + 1);
      this.handlers.pool(pool);
    });
    source.addEventListener("cells", (event) => {
      const page = JSON.parse(event.data);
      maps[page.tier].set(decoded(page.cells), page.first);
    });
    source.addEventListener("drawn", () => {
      this.handlers.drawn(maps);
      this.handlers.state("live", "live");
    });
    source.addEventListener("changes", (event) => this.handlers.changes(JSON.parse(event.data)));
    source.addEventListener("gone", () => this.lost("waiting", "the engine has detached"));
    source.addEventListener("error", () => this.lost("away", "the connection was lost"));
  }

  lost(state, text) {
    this.handlers.state(state, text);
    this.source?.close();
    this.source = null;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.findPool(), RETRY_MS / 2);
  }
}

export async function ask(path, options) {
  const response = await fetch(path, options);
  const body = await response.json();
  if (!response.ok) throw new Error(body.error?.message || response.statusText);
  return body;
}

export const send = (path, body = {}) =>
  ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
