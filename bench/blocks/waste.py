"""Breakdown of granted KV memory: tokens, reserved, lookahead, internal, as in the paper's Figure 2."""

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
    sampled_requests,
    scaled_to,
    serve,
)
from bench.report.results import publish, row
from engine.schedule.limits import Limits
from engine.schedule.request import Capacity
from engine.schedule.scheduler import Scheduler

BLOCK_SIZE = 16
# OPT-13B on an A100 with 40 GB has 12 GB for KV, which is 15.7 thousand slots (Table 1 of the paper).
PAPER_BLOCKS = 980
REQUESTS = 1_000
LONG_REQUESTS = 400
LIMITS = Limits(token_budget=512, max_sequences=256, max_waiting=1024)
KINDS = ("tokens", "reserved", "lookahead", "internal")


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
    """Serve both mixes, and publish the shares of granted slots."""
    as_it_is = lengths_of("sharegpt_8k_lengths.csv", "num_prefill_tokens", "num_decode_tokens")
    mixes = {
        "scaled": (scaled_to(as_it_is, 161, 338)[:REQUESTS], PAPER_BLOCKS),
        "as_it_is": (as_it_is[:LONG_REQUESTS], 6 * PAPER_BLOCKS),
    }
    rows, shares, preemptions = [], {}, {}
    with Progress() as progress:
        for name, (lengths, blocks) in mixes.items():
            watch, preemptions[name] = _served(name, lengths, blocks, progress)
            shares[name] = watch.means()
            rows += [row("waste", f"{name}_{kind}_share", round(shares[name][kind], 4), "share") for kind in KINDS]
            lost = shares[name]["lookahead"] + shares[name]["internal"]
            rows.append(row("waste", f"{name}_lookahead_and_internal_share", round(lost, 4), "share"))
            rows.append(row("waste", f"{name}_overhead", round(mean(watch.overheads), 4), "ratio"))
            rows.append(row("waste", f"{name}_steps_watched", len(watch.shares), "steps"))
    publish("waste", rows, 1, preemptions=preemptions)


def _served(name: str, lengths: list[Lengths], blocks: int, progress: Progress) -> tuple[SlotShares, int]:
    task = progress.add_task(name, total=len(lengths))
    watch = SlotShares()
    capacity = Capacity(CONTEXT_TOKENS, VOCABULARY, BLOCK_SIZE, blocks)
    scheduler = Scheduler(capacity, LIMITS)
    requests = sampled_requests(lengths, 1)
    serve(requests, scheduler, NoRunner(), watch, lambda ended: progress.update(task, completed=ended))
    return watch, scheduler.totals.preemptions


if __name__ == "__main__":
    main()
