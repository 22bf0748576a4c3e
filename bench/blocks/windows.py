"""Memory of window kinds: the blocks that sequences hold and the sequences that fit, against the exact arithmetic.

*Held*: for each model, a sequence of 32k tokens on the real scheduler and the real core, with a model that computes
nothing: the bytes of its blocks while it decodes, over those of the tokens that its layers see. Beside them what it
held if all layers kept all tokens.

*Sequences*: requests of lengths from 1k to 32k on a Gemma-3-27B shape in 24 GiB, uniform and log-uniform, with budgets
of 512 and 2,048 tokens a step: how many run on average while others wait, over how many the same memory would hold if
it were divided byte by byte.

*Hits*: coding-agent sessions and the conversation trace of Mooncake on the same shape: the share of prompt tokens that
were cached, over that of a pool of full attention with as many blocks as kind 0.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any, NamedTuple

import torch
from rich.progress import Progress

import kvmanager
from bench.loads.memory import Lengths, NoRunner, data_file, sampled_requests, serve
from bench.report.results import Row, publish, row
from bench.report.terms import Terms
from engine.attention.cache import CacheGeometry, LayerShape
from engine.kinds.layer_kinds import LayerKind, layer_kinds
from engine.kinds.split import SplitSizes, split_blocks, split_memory
from engine.run.loop import Engine
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from tests.in_process import InProcessBlocks

BLOCK_SIZE = 16
TOKENS = 32768
VOCABULARY = 1 << 31  # of traces: each block has tokens of its own
_OWN = 1 << 29
DTYPE = torch.bfloat16
BUDGETS = (512, 2048)
OUTPUT = 256
MEMORY = 24 << 30
SEQUENCES = 64
REQUESTS = 150
SHORTEST = 1024
HIT_SEQUENCES = 16
HIT_BLOCKS = 16384
CALLS = 3000
ANSWER = 16
CODE = ("blocks", "engine/kinds", "engine/run", "engine/schedule", "kvmanager", "bench/blocks/windows.py")


@dataclass(frozen=True)
class Model:
    """The shape of a published model's KV cache: `full` of its layers see all tokens, the others a window."""

    layers: int
    full: int
    kv_heads: int
    head_size: int
    window: int

    def geometry(self) -> CacheGeometry:
        """Return the shape of each layer; in which order the layers are does not matter here."""
        shape = LayerShape(self.kv_heads, self.head_size, self.head_size)
        windows = (shape._replace(window=self.window),) * (self.layers - self.full)
        return CacheGeometry((*(shape,) * self.full, *windows))

    @property
    def layer_bytes(self) -> int:
        """Bytes of a token's K and V in one layer."""
        return 2 * self.kv_heads * self.head_size * DTYPE.itemsize

    def seen_bytes(self, tokens: int) -> int:
        """Return the bytes of what a sequence's layers see, byte by byte."""
        seen = self.full * tokens + (self.layers - self.full) * min(tokens, self.window)
        return seen * self.layer_bytes

    def all_bytes(self, tokens: int) -> int:
        """Return the bytes of all tokens in all layers."""
        return self.layers * tokens * self.layer_bytes


# https://huggingface.co: config.json of each.
MODELS = {
    "gemma_3_27b": Model(62, 10, 16, 128, 1024),
    "gemma_3_12b": Model(48, 8, 8, 256, 1024),
    "gemma_3_4b": Model(34, 5, 4, 256, 1024),
    "gemma_3_1b": Model(26, 4, 1, 256, 512),
    "gpt_oss_20b": Model(24, 12, 8, 64, 128),
    "gpt_oss_120b": Model(36, 18, 8, 64, 128),
    "olmo_3_7b": Model(32, 8, 32, 128, 4096),
    "exaone_4_32b": Model(64, 16, 8, 128, 4096),
    "command_a_111b": Model(64, 16, 8, 128, 4096),
    "gemma_2_9b": Model(42, 21, 8, 256, 4096),
}
GEMMA = MODELS["gemma_3_27b"]


def main() -> None:
    """Measure both, and publish the results."""
    rows: list[Row] = []
    with Progress() as progress:
        task = progress.add_task("held", total=len(MODELS))
        for name, model in MODELS.items():
            rows += held_rows(name, model)
            progress.advance(task)
        for budget in BUDGETS:
            for name, lengths in distributions().items():
                rows += pool_rows(name, budget, lengths, progress)
        for trace in TRACES:
            rows += hit_rows(trace, progress)
    publish("windows", rows, 1, code=CODE)


# Held by one sequence


@dataclass
class Held:
    """The bytes of held blocks after each step, from the first one on that decodes."""

    block_bytes: Sequence[int]
    prompt: int
    found: list[int] = field(default_factory=list)
    most: int = 0

    def __call__(self, pool: kvmanager.Pool, _: Scheduler) -> None:
        """Record a pool's state after a step."""
        counts = [kind.device.counts.held for kind in pool.state.kinds]
        held = sum(count * size for count, size in zip(counts, self.block_bytes, strict=True))
        self.most = max(self.most, held)
        if any(one.computed_tokens > self.prompt for one in pool.sequences.values()):
            self.found.append(held)


def held_rows(name: str, model: Model) -> list[Row]:
    """Serve one request of 32k tokens with kinds; return what its blocks take."""
    budget, prompt = BUDGETS[0], TOKENS - OUTPUT
    kinds, block_bytes = kinds_of(model)
    sizes = SplitSizes(BLOCK_SIZE, TOKENS, budget, 1, TOKENS)
    capacity = capacity_of(kinds, split_blocks(kinds, TOKENS // BLOCK_SIZE, sizes), block_bytes, budget)
    watch = Held(block_bytes, prompt)
    scheduler = Scheduler(capacity, Limits(token_budget=budget, max_sequences=1))
    serve(sampled_requests([Lengths(prompt, OUTPUT)], 1), scheduler, NoRunner(), watch, lambda _: None)
    seen = mean(model.seen_bytes(prompt + done) for done in range(1, OUTPUT))
    values = {
        "held": (round(mean(watch.found) / 2**30, 3), "GiB"),
        "held_at_most": (round(watch.most / 2**30, 3), "GiB"),
        "held_without_kinds": (round(model.all_bytes(TOKENS) / 2**30, 3), "GiB"),
        "held_over_arithmetic": (round(mean(watch.found) / seen, 4), "ratio"),
    }
    terms = {"quire": Terms(work=f"a prompt of {prompt} tokens and {OUTPUT} generated ones, {budget} tokens a step")}
    return [row("windows", f"{name}_{metric}", *value, terms=terms, exact=True) for metric, value in values.items()]


# Sequences in a pool


def distributions() -> dict[str, list[int]]:
    """Return the lengths of requests by name: prompt and answer, from 1k to 32k tokens."""
    draw = random.Random(20261128)
    uniform = [draw.randint(SHORTEST, TOKENS) for _ in range(REQUESTS)]
    logarithms = [math.exp(draw.uniform(math.log(SHORTEST), math.log(TOKENS))) for _ in range(REQUESTS)]
    return {"uniform": uniform, "log_uniform": [round(one) for one in logarithms]}


@dataclass
class Running:
    """The bytes that running sequences see, and their number, at each step while others wait."""

    model: Model
    counts: list[int] = field(default_factory=list)
    possible: list[float] = field(default_factory=list)

    def __call__(self, pool: kvmanager.Pool, scheduler: Scheduler) -> None:
        """Record a pool's state after a step."""
        if not scheduler.waiting or not pool.sequences:
            return
        lengths = [one.prompt_tokens for one in pool.sequences.values()]
        self.counts.append(len(lengths))
        self.possible.append(MEMORY / mean(map(self.model.seen_bytes, lengths)))


def pool_rows(name: str, budget: int, lengths: list[int], progress: Progress) -> list[Row]:
    """Serve requests of these lengths from a full queue; return how many run."""
    kinds, block_bytes = kinds_of(GEMMA)
    sizes = SplitSizes(BLOCK_SIZE, TOKENS, budget, SEQUENCES, round(mean(lengths)))
    capacity = capacity_of(kinds, split_memory(kinds, block_bytes, MEMORY, sizes), block_bytes, budget)
    watch = Running(GEMMA)
    scheduler = Scheduler(capacity, Limits(token_budget=budget, max_sequences=SEQUENCES))
    task = progress.add_task(f"{name}, {budget} tokens a step", total=len(lengths))
    requests = sampled_requests([Lengths(one - OUTPUT, OUTPUT) for one in lengths], 1)
    serve(requests, scheduler, NoRunner(), watch, lambda ended: progress.update(task, completed=ended))
    all_at_once = [GEMMA.all_bytes(one) for one in lengths]
    values = {
        "sequences": (round(mean(watch.counts), 2), "sequences"),
        "sequences_without_kinds": (round(MEMORY / mean(all_at_once), 2), "sequences"),
        "sequences_over_arithmetic": (round(mean(watch.counts) / mean(watch.possible), 4), "ratio"),
    }
    terms = {"quire": Terms(work=f"{len(lengths)} requests, {name} from 1k to 32k tokens, {budget} tokens a step")}
    prefix = f"{name}_{budget}"
    return [row("windows", f"{prefix}_{metric}", *value, terms=terms, exact=True) for metric, value in values.items()]


# Hits


class Trace(NamedTuple):
    """A trace of prompts by the ids of their prefix blocks of `size` tokens."""

    name: str
    file: str
    ids: str
    size: int


TRACES = (
    Trace("agent_sessions", "agent_sessions.jsonl", "block_ids", 16),
    Trace("mooncake", "mooncake_conversation.jsonl", "hash_ids", 512),
)


def hit_rows(trace: Trace, progress: Progress) -> list[Row]:
    """Serve a trace with kinds and with full attention; return the shares of cached prompt tokens."""
    kinds, block_bytes = kinds_of(GEMMA)
    sizes = SplitSizes(BLOCK_SIZE, TOKENS, BUDGETS[1], HIT_SEQUENCES, TOKENS // 2)
    windows = capacity_of(kinds, split_blocks(kinds, HIT_BLOCKS, sizes), block_bytes, BUDGETS[1])
    shares = {
        name: _hit_share(trace, capacity, progress, name)
        for name, capacity in (("full_attention", replace(windows, windows=())), ("kinds", windows))
    }
    values = {f"hits_of_{name}": (round(share, 4), "share") for name, share in shares.items()}
    values["hits_over_full_attention"] = (round(shares["kinds"] / shares["full_attention"], 4), "ratio")
    terms = {
        "quire": Terms(work=f"{CALLS} calls at most, prompts cut to {TOKENS - ANSWER} tokens, {HIT_BLOCKS} blocks")
    }
    return [
        row("windows", f"{trace.name}_{metric}", *value, terms=terms, exact=True) for metric, value in values.items()
    ]


def _hit_share(trace: Trace, capacity: Capacity, progress: Progress, name: str) -> float:
    lines = data_file(trace.file).read_text().splitlines()[:CALLS]
    task = progress.add_task(f"{trace.name}, {name}", total=len(lines))
    scheduler = Scheduler(capacity, Limits(token_budget=BUDGETS[1], max_sequences=HIT_SEQUENCES))
    engine = Engine(scheduler, NoRunner(), InProcessBlocks(capacity), lambda: 0.0)
    calls = enumerate(map(json.loads, lines))
    call = next(calls, None)
    while call is not None or not scheduler.empty:
        while call is not None and scheduler.waiting < 2:
            scheduler.requests.submit(_request(trace, *call))
            call = next(calls, None)
            progress.advance(task)
        engine.turn()
    totals = scheduler.totals
    return totals.cached_tokens / totals.prompt_tokens


def _request(trace: Trace, number: int, call: dict[str, Any]) -> Request:
    """Return a call's request: equal blocks have equal tokens, and the rest of a prompt is its own."""
    length = min(call["input_length"], TOKENS - ANSWER)
    tokens = [one * trace.size + place for one in call[trace.ids] for place in range(trace.size)][:length]
    tokens += [_OWN + number * trace.size + place for place in range(length - len(tokens))]
    return Request(
        request_id=f"r{number}",
        prompt=tuple(tokens),
        sampling=Sampling(seed=number),
        stopping=Stopping(ANSWER),
        arrival=float(number),
    )


def kinds_of(model: Model) -> tuple[tuple[LayerKind, ...], list[int]]:
    """Return the kinds of a model's blocks, and the bytes of a block of each."""
    geometry = model.geometry()
    kinds = layer_kinds(geometry, TOKENS + 1)
    return kinds, [kind.geometry(geometry).block_bytes(BLOCK_SIZE, DTYPE) for kind in kinds]


def capacity_of(kinds: Sequence[LayerKind], blocks: Sequence[int], block_bytes: Sequence[int], budget: int) -> Capacity:
    """Return the capacity of a pool with these blocks of each kind."""
    columns = list(zip(kinds, blocks, block_bytes, strict=True))[1:]
    windows = tuple([kind.window(count, 0, size) for kind, count, size in columns])
    return Capacity(TOKENS + 1, VOCABULARY, BLOCK_SIZE, blocks[0], windows=windows, step_tokens=budget)


if __name__ == "__main__":
    main()
