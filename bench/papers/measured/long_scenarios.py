"""The three scenarios of FlexAttention, and decoding beside fused attention on contiguous memory, on the CPU.

Runs are repeated, each time with an empty cache; the first repetition warms up and is not counted.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict
from time import perf_counter
from typing import NamedTuple

# First, because it sets how threads of torch wait.
from bench.loads.engine_worker import terms_of  # isort: skip
from bench.engine.context import GREEDY, decode, decoded_at, engine_of
from bench.papers.case import Values
from bench.papers.measured.contiguous_model import ContiguousModel, ContiguousSequence
from bench.papers.measured.long_model import long_folder, long_parts
from bench.report.terms import check_equal
from blocks import blocks_for
from engine.run.loop import Engine
from engine.schedule.outputs import Tokens
from engine.schedule.request import Request, Stopping
from services.engine.startup.assembly import EngineParts

STEADY = 256  # "Steady-state decode rate averaged over the final 256 tokens"
_FIRST_PROMPT = 16


def one_sequence(tokens: int, lengths: Sequence[int], page_size: int, layers: int) -> Values:
    """Generate one sequence of `tokens` tokens; return the seconds of the last 256 before each length.

    With `layers`, 0 for all of them, the model has its first ones only, so that hours become minutes.
    """
    parts = long_parts(tokens, page_size, layers=layers)
    engine, text = engine_of(parts), _text(parts, _FIRST_PROMPT)
    decode(engine, Request("warm", text, GREEDY, Stopping(4)))
    begun = perf_counter()
    seconds = decode(engine, Request("one", text, GREEDY, Stopping(tokens - _FIRST_PROMPT)))
    ends = {str(length): length - _FIRST_PROMPT - 1 for length in lengths}  # the first token has no time
    return {
        "seconds": {length: seconds[max(0, end - STEADY) : end] for length, end in ends.items()},
        "total_seconds": perf_counter() - begun,
        "kv_bytes": _kv_bytes(parts, tokens, page_size),
        "terms": asdict(terms_of(parts, "a sequence")),
    }


def mixed_batch(prompts: Sequence[int], decoded: int, page_size: int, repetitions: int) -> Values:
    """Serve prompts of all lengths at once; return for each repetition the first tokens' times, and that of all."""
    parts = long_parts(sum(prompts) + len(prompts) * (decoded + page_size), page_size)
    runs = [_serve_batch(parts, prompts, decoded) for _ in range(repetitions + 1)][1:]
    tokens = [blocks_for(prompt + decoded, page_size) * page_size for prompt in prompts]
    return {
        "first_seconds": {str(prompt): [run.first[place] for run in runs] for place, prompt in enumerate(prompts)},
        "seconds": [run.seconds for run in runs],
        "generated": len(prompts) * decoded,
        "overhead": sum(tokens) / sum(prompt + decoded for prompt in prompts) - 1,
        "terms": asdict(terms_of(parts, "a batch")),
    }


def growing_chat(lengths: Sequence[int], answer: int, page_size: int, repetitions: int) -> Values:
    """Serve a chat whose prompt grows to each of `lengths`, with an answer each turn.

    Return the seconds to the first token and of each further one, by length and repetition. All but the new part of a
    prompt is in the prefix cache.
    """
    parts = long_parts(max(lengths) + answer, page_size)
    text = _text(parts, max(lengths))
    first: dict[str, list[float]] = {str(length): [] for length in lengths}
    rest: dict[str, list[float]] = {str(length): [] for length in lengths}
    for repetition in range(repetitions + 1):
        engine = engine_of(parts)
        for length in lengths:
            begun = perf_counter()
            seconds = decode(engine, Request(f"r{length}", text[:length], GREEDY, Stopping(answer)))
            if repetition:
                first[str(length)].append(perf_counter() - begun - sum(seconds))
                rest[str(length)] += seconds
    return {"first_seconds": first, "seconds": rest, "terms": asdict(terms_of(parts, "a chat"))}


def paged_and_fused(lengths: Sequence[int], page_size: int, repetitions: int) -> Values:
    """Return the seconds of a token at the end of each length, in pages and by torch's fused attention.

    The default's sequence is computed once, then cut from the longest length to the shortest.
    """
    parts, model = long_parts(max(lengths), page_size), ContiguousModel("bfloat16", long_folder())
    terms = terms_of(parts, "a token")
    check_equal("paged_over_fused", {"paged": terms, "fused": model.terms("a token")})
    text, engine = _text(parts, max(lengths)), engine_of(parts)
    found: dict[str, dict[str, list[float]]] = {way: {str(one): [] for one in lengths} for way in ("paged", "fused")}
    longest_first = sorted(lengths, reverse=True)
    sequence, held = ContiguousSequence(model, text), max(lengths)
    for length in longest_first:
        if held > length:
            sequence.forget(held - length)
            held = length
        for repetition in range(repetitions + 1):
            paged, fused = decoded_at(engine, text[:length]), sequence.decode(STEADY // 16)
            sequence.forget(STEADY // 16)
            if repetition:
                found["paged"][str(length)] += paged
                found["fused"][str(length)] += fused
    return {"seconds": found, "terms": asdict(terms)}


class _Batch(NamedTuple):
    first: list[float]
    seconds: float


def _serve_batch(parts: EngineParts, prompts: Sequence[int], decoded: int) -> _Batch:
    """Serve prompts that arrive together with an empty cache."""
    engine = engine_of(parts)
    begun = perf_counter()
    for number, prompt in enumerate(prompts):
        text = _text(parts, prompt, number)
        request = Request(f"r{number}", text, GREEDY, Stopping(decoded), arrival=begun)
        engine.scheduler.requests.submit(request)
    first = _first_tokens(engine, begun)
    return _Batch([first[f"r{number}"] for number in range(len(prompts))], perf_counter() - begun)


def _first_tokens(engine: Engine, begun: float) -> dict[str, float]:
    """Run until no request is live; return the seconds to the first token of each."""
    found: dict[str, float] = {}
    while not engine.scheduler.empty:
        outputs = engine.turn().outputs
        assert engine.last_failure is None
        for one in outputs:
            if isinstance(one, Tokens):
                found.setdefault(one.request_id, perf_counter() - begun)
    return found


def _text(parts: EngineParts, tokens: int, seed: int = 1) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(10, parts.loaded.vocabulary_size) for _ in range(tokens))


def _kv_bytes(parts: EngineParts, tokens: int, page_size: int) -> int:
    return blocks_for(tokens, page_size) * parts.loaded.geometry.block_bytes(page_size, parts.loaded.cache_dtype)
