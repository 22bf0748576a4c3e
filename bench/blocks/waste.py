"""Breakdown of granted KV memory: tokens, reserved, lookahead, internal, as in the PagedAttention paper's Figure 2.

The lengths are the paper's own: the pairs of its ShareGPT file that its model can serve. Beside them stand those of
another ShareGPT file, whose prompts are whole chats: scaled to the paper's means, and as they are. Each mix is served
twice, with equal results.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean

from rich.progress import Progress

import kvmanager
from bench.loads.memory import (
    CONTEXT_TOKENS,
    VOCABULARY,
    Lengths,
    NoRunner,
    lengths_of,
    paper_lengths,
    sampled_requests,
    scaled_to,
    serve,
)
from bench.report.results import Row, publish, row
from bench.report.terms import Terms
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits
from engine.schedule.scheduler import Scheduler

BLOCK_SIZE = 16
# OPT-13B on an A100 with 40 GB has 12 GB for KV, which is 15.7 thousand slots (Table 1 of the paper).
PAPER_BLOCKS = 980
REQUESTS = 1_000
LONG_REQUESTS = 400
LIMITS = Limits(token_budget=512, max_sequences=256, max_waiting=1024)
RUNS = 2
CODE = ("blocks", "engine/run", "engine/schedule", "kvmanager", "bench/blocks/waste.py", "bench/loads/memory.py")
KINDS = ("tokens", "reserved", "lookahead", "internal")


@dataclass(frozen=True)
class Mix:
    """Lengths of requests, the pool that serves them, and what they are."""

    lengths: list[Lengths]
    blocks: int
    work: str


@dataclass
class SlotShares:
    """Shares of the granted slots, at each step from the first preemption on."""

    shares: list[tuple[float, ...]] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)

    def __call__(self, pool: kvmanager.Pool, scheduler: Scheduler) -> None:
        """Record a pool's state after a step."""
        slots = pool.slots()
        if scheduler.totals.preemptions and slots.tokens:
            self.shares.append(tuple(one / sum(slots) for one in slots))
            self.overheads.append(sum(slots) / slots.tokens - 1)

    def means(self) -> dict[str, float]:
        """Return each kind's mean share."""
        return {kind: mean(share[place] for share in self.shares) for place, kind in enumerate(KINDS)}


def main() -> None:
    """Serve all mixes, and publish the shares of granted slots."""
    rows, preemptions = [], {}
    with Progress() as progress:
        for name, mix in mixes().items():
            watch, preemptions[name] = repeated_exactly(lambda: _served(name, mix, progress))  # noqa: B023
            rows += rows_of(name, watch, mix.work)
    publish("waste", rows, RUNS, code=CODE, preemptions=preemptions)


def mixes() -> dict[str, Mix]:
    """Return the mixes by name. Raises DataMissing."""
    chats = lengths_of("sharegpt_8k_lengths.csv", "num_prefill_tokens", "num_decode_tokens")
    scaled = scaled_to(chats, 161, 338)[:REQUESTS]
    return {
        "paper": Mix(paper_lengths(REQUESTS), PAPER_BLOCKS, f"{REQUESTS} requests of the paper's ShareGPT lengths"),
        "scaled": Mix(scaled, PAPER_BLOCKS, f"{REQUESTS} requests of other ShareGPT lengths, scaled to its means"),
        "as_it_is": Mix(chats[:LONG_REQUESTS], 6 * PAPER_BLOCKS, f"{LONG_REQUESTS} requests of whole chats"),
    }


def repeated_exactly(serve: Callable[[], tuple[SlotShares, int]]) -> tuple[SlotShares, int]:
    """Return what was served, after a proof that it repeats."""
    first, *others = (serve() for _ in range(RUNS))
    assert all(one == first for one in others), "the same requests were served in another way"
    return first


def rows_of(name: str, watch: SlotShares, work: str) -> list[Row]:
    """Return the shares of a mix."""
    shares = watch.means()
    lost = shares["lookahead"] + shares["internal"]
    values = {
        **{f"{kind}_share": (round(shares[kind], 4), "share") for kind in KINDS},
        "lookahead_and_internal_share": (round(lost, 4), "share"),
        "overhead": (round(mean(watch.overheads), 4), "ratio"),
        "steps_watched": (len(watch.shares), "steps"),
    }
    terms = {"quire": Terms(work=work)}
    return [
        row("waste", f"{name}_{metric}", value, unit, terms=terms, exact=True)
        for metric, (value, unit) in values.items()
    ]


def _served(name: str, mix: Mix, progress: Progress) -> tuple[SlotShares, int]:
    """Return the shares at each step, and the number of preemptions."""
    task = progress.add_task(name, total=len(mix.lengths))
    watch = SlotShares()
    capacity = Capacity(CONTEXT_TOKENS, VOCABULARY, BLOCK_SIZE, mix.blocks)
    scheduler = Scheduler(capacity, LIMITS)
    requests = sampled_requests(mix.lengths, 1)
    serve(requests, scheduler, NoRunner(), watch, lambda ended: progress.update(task, completed=ended))
    return watch, scheduler.totals.preemptions


if __name__ == "__main__":
    main()
