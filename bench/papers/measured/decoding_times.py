"""Seconds of a decoded token by the length of its sequence: with the cache, without, and on contiguous memory."""

import random
from collections.abc import Sequence
from dataclasses import asdict

# First, because it sets how threads of torch wait.
from bench.loads.engine_worker import BFLOAT16, demo_parts, terms_of  # isort: skip
from bench.engine.context import DECODED, decoded_at, engine_of, recomputed_at
from bench.papers.case import Values
from bench.papers.measured.contiguous_model import ContiguousModel, ContiguousSequence
from bench.report.terms import check_equal
from blocks import blocks_for
from services.engine.startup.assembly import EngineParts

Seconds = dict[str, list[float]]

BLOCK_SIZE = 16
_SPARE_BLOCKS = 32  # for the tokens decoded after each length


def with_and_without_cache(backend: str, lengths: Sequence[int], repetitions: int) -> Values:
    """Return the seconds of tokens decoded at the end of each length, with the cache, and with all recomputed."""
    parts = paged_parts(backend, max(lengths))
    text, engine = text_of(parts, max(lengths)), engine_of(parts)
    seconds: dict[str, Seconds] = {way: {str(length): [] for length in lengths} for way in ("cached", "recomputed")}
    for repetition in range(repetitions + 1):  # the first fills the cache, and warms up
        for length in lengths:
            cached, recomputed = decoded_at(engine, text[:length]), recomputed_at(parts, text[:length])
            if repetition:
                seconds["cached"][str(length)] += cached
                seconds["recomputed"][str(length)].append(recomputed)
    terms = asdict(terms_of(parts, "a token"))
    return {"seconds": seconds, "backend": backend, "device": parts.device, "terms": terms}


def paged_and_default(backend: str, dtype: str, lengths: Sequence[int], repetitions: int) -> Values:
    """Return the seconds of tokens decoded at the end of each length, in blocks and by transformers' default.

    `dtype` is the type of the default's weights and cache. Raises UnequalTerms if the engine's are of another.
    """
    parts, model = paged_parts(backend, max(lengths)), ContiguousModel(dtype)
    terms = terms_of(parts, "a token")
    check_equal("paged_over_default", {"paged": terms, "default": model.terms("a token")})
    text, engine = text_of(parts, max(lengths)), engine_of(parts)
    sequences = {length: ContiguousSequence(model, text[: length - DECODED]) for length in lengths}
    seconds: dict[str, Seconds] = {way: {str(length): [] for length in lengths} for way in ("paged", "default")}
    for repetition in range(repetitions + 1):  # the first fills the cache, and warms up
        for length, sequence in sequences.items():
            paged, default = decoded_at(engine, text[:length]), sequence.decode(DECODED - 1)
            sequence.forget(DECODED - 1)
            if repetition:
                seconds["paged"][str(length)] += paged
                seconds["default"][str(length)] += default
    return {"seconds": seconds, "backend": backend, "dtype": dtype, "device": parts.device, "terms": asdict(terms)}


def paged_parts(backend: str, longest: int) -> EngineParts:
    """Return an engine whose pool holds a text of the longest length, with what is decoded meanwhile.

    FlexAttention's kernels for CPUs are fast in float32 only.
    """
    types = {"dtype": "float32", "weights": "auto"} if backend == "flex" else BFLOAT16
    blocks = blocks_for(longest, BLOCK_SIZE) + _SPARE_BLOCKS
    return demo_parts(blocks, device="cpu", attention_backend=backend, **types)


def text_of(parts: EngineParts, tokens: int) -> tuple[int, ...]:
    """Return random tokens of the vocabulary, always the same."""
    draw = random.Random(1)
    return tuple(draw.randrange(10, parts.loaded.vocabulary_size) for _ in range(tokens))
