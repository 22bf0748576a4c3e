"""How many blocks sharing saves: samples of one prompt, as in Figure 15 of the PagedAttention paper."""

from dataclasses import dataclass, field
from statistics import mean

from rich.progress import Progress

import kvmanager
from bench.memory import CONTEXT_TOKENS, VOCABULARY, Lengths, lengths_of, scaled_to, serve
from bench.report import publish, row
from engine.request import Capacity
from engine.scheduler import Limits, Scheduler

BLOCK_SIZE = 16
BLOCKS = 980
REQUESTS = 500
SAMPLES = (2, 4, 6)
# Per cent of blocks saved in the paper, for the Alpaca and the ShareGPT trace, by the number of samples.
PAPER = {"alpaca": {2: 6.09, 4: 8.53, 6: 9.79}, "sharegpt": {2: 16.2, 4: None, 6: 30.5}}


@dataclass
class Watch:
    """The share of blocks that sharing saves, at each step: of all that there would be without it."""

    shares: list[float] = field(default_factory=list)

    def __call__(self, pool: kvmanager.Pool, _scheduler: Scheduler) -> None:
        """Look at a pool after a step."""
        held = pool.device.counts.held
        if held:
            self.shares.append(pool.device.saved / (held + pool.device.saved))


def main() -> None:
    """Serve both mixes with several samples, and publish what was saved."""
    alpaca = lengths_of("alpaca_lengths.csv", "prompt_tokens", "output_tokens")
    sharegpt = lengths_of("sharegpt_8k_lengths.csv", "num_prefill_tokens", "num_decode_tokens")
    mixes = {
        "alpaca": scaled_to(alpaca, 19, 58)[:REQUESTS],
        "alpaca_as_it_is": alpaca[:REQUESTS],
        "sharegpt": scaled_to(sharegpt, 161, 338)[:REQUESTS],
    }
    rows = []
    with Progress() as progress:
        for name, lengths in mixes.items():
            for samples in SAMPLES:
                saved = _saved(f"{name}, {samples} samples", lengths, samples, progress)
                rows.append(row("sharing", f"{name}_{samples}_samples_saved", round(100 * saved, 2), "%"))
                paper = PAPER.get(name, {}).get(samples)
                if paper is not None:
                    rows.append(
                        row("sharing", f"{name}_{samples}_samples_saved_in_the_paper", paper, "%", "vLLM, paper")
                    )
    rows += [row("sharing", f"alpaca_beam_width_{width}_saved", None, "%") for width in SAMPLES]
    publish("sharing", rows, 1)


def _saved(title: str, lengths: list[Lengths], samples: int, progress: Progress) -> float:
    task = progress.add_task(title, total=len(lengths))
    watch = Watch()
    capacity = Capacity(CONTEXT_TOKENS, VOCABULARY, BLOCK_SIZE, BLOCKS)
    limits = Limits(token_budget=512, max_sequences=256)
    serve(lengths, capacity, limits, samples, watch, lambda taken: progress.update(task, completed=taken))
    return mean(watch.shares)


if __name__ == "__main__":
    main()
