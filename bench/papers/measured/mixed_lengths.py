"""Slots granted to requests of mixed lengths, by the real scheduler and the KV manager's core, without computation."""

import random
from collections.abc import Sequence
from statistics import mean

import kvmanager
from bench.loads.memory import CONTEXT_TOKENS, VOCABULARY, Lengths, NoRunner, sampled_requests, serve
from bench.papers.case import Values
from blocks import blocks_for
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits
from engine.schedule.scheduler import Scheduler

STEP, LONGEST, OUTPUT = 256, 4096, 128
CONCURRENT = 16  # the paper's mixed batch
_LIMITS = Limits(token_budget=LONGEST, max_sequences=CONCURRENT, max_waiting=1024)


def granted_slots(block_sizes: Sequence[int], requests: int) -> Values:
    """Return mean overheads over all steps: granted slots over needed ones, minus 1.

    `of_tokens`: needed are the slots of computed tokens. `of_sequences`: also those of the rest of running prompts, for
    which slots are granted at once. `contiguous`: as `of_tokens`, if each request reserved the longest sequence.
    Prompts are uniform in {256, 512, ..., 4096} tokens (`mixed`), or in all lengths between (`any`); 128 tokens follow.
    """
    mixes = {"mixed": _lengths(requests, STEP), "any": _lengths(requests, 1)}
    found = {name: {str(size): _overheads(lengths, size) for size in block_sizes} for name, lengths in mixes.items()}
    return {"overheads": found, "requests": requests}


def _lengths(requests: int, step: int) -> list[Lengths]:
    draw = random.Random(1)
    return [Lengths(step * draw.randint(STEP // step, LONGEST // step), OUTPUT) for _ in range(requests)]


def _overheads(lengths: list[Lengths], block_size: int) -> dict[str, float]:
    """Serve requests with a pool in which all fit, so that none is preempted."""
    found: list[tuple[float, float, float]] = []

    def watch(pool: kvmanager.Pool, scheduler: Scheduler) -> None:
        slots = pool.slots()
        if slots.tokens:
            reserved = scheduler.running * (LONGEST + OUTPUT)
            of_sequences = sum(slots) / (slots.tokens + slots.reserved)
            found.append((sum(slots) / slots.tokens - 1, of_sequences - 1, reserved / slots.tokens - 1))

    blocks = CONCURRENT * blocks_for(LONGEST + OUTPUT, block_size) + CONCURRENT
    scheduler = Scheduler(Capacity(CONTEXT_TOKENS, VOCABULARY, block_size, blocks), _LIMITS)
    serve(sampled_requests(lengths, 1), scheduler, NoRunner(), watch, lambda _: None)
    means = map(mean, zip(*found, strict=True))
    return dict(zip(("of_tokens", "of_sequences", "contiguous"), means, strict=True)) | {"steps": len(found)}
