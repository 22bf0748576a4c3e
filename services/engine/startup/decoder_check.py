"""Checks that Quire's own decoders compute the same logits as a model's modules, and recorded steps those launched."""

import logging
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Protocol

import torch

from blocks import blocks_for
from engine.attention.backend import PagedBatch
from engine.errors import ModelUnsupported
from engine.kinds.kinds_backend import backends_of
from engine.model.decoder import Decoder
from engine.model.loaded import LoadedModel, dtype_name
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work

# Both round, at different places: logits differ by some hundredths of their spread, and by more at single tokens.
_MAX_DIFFERENCE = 0.2
CHECKED_TOKENS = 24
_COMPARED_ROWS = 16  # logits of a step with prompts
# A block table of so many tokens has several chunks (engine.triton_kernels.tuning.MIN_CHUNK), over which the keys of
# few new tokens are split.
_SPLIT_TOKENS = 1024

# Arguments of `Decoder.logits`.
_Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch]

log = logging.getLogger("quire.engine")


class _Cached(Protocol):
    @property
    def block_size(self) -> int: ...

    @property
    def cache(self) -> torch.Tensor: ...


def warm_up(decoder: Decoder, loaded: LoadedModel, backend: _Cached) -> None:
    """Run prefill and decode once, so that they are compiled. Overwrites the first blocks of the cache."""
    prompt, positions, batch = _prompt(loaded, backend)
    last = positions[-1:]
    table = tuple(batch.tables[0].tolist())
    one = PagedBatch.of([_work(int(last), 1, table, len(batch.windows))], backend.block_size, backend.cache.device)
    with torch.inference_mode():
        decoder.logits(prompt, positions, last, batch)
        decoder.logits(prompt[-1:], last, torch.zeros_like(last), one)


def run_behind_prefix(decoder: Decoder, loaded: LoadedModel, backend: _Cached) -> None:
    """Run two tokens with a block table as of a long prefix once, so that the kernels for that are compiled.

    Overwrites the first block of the cache.
    """
    device = backend.cache.device
    table = (1,) * blocks_for(min(loaded.context_tokens, _SPLIT_TOKENS), backend.block_size)
    two = torch.arange(min(2, loaded.context_tokens), device=device)
    batch = PagedBatch.of([_work(0, len(two), table)], backend.block_size, device)
    with torch.inference_mode():
        decoder.logits(two % loaded.vocabulary_size, two, two[-1:], batch)


def matches(name: str, ours: Decoder, modules: Decoder, loaded: LoadedModel, backend: _Cached) -> bool:
    """Return True if both decoders give nearly the same logits for a few tokens; otherwise log a warning.

    Overwrites the first blocks of the cache, which must be free.
    """
    apart = _difference(ours, modules, loaded, backend)
    if not apart < _MAX_DIFFERENCE:
        log.warning("%s is not used for this model: its logits differ by %.2g", name, apart)
        return False
    return True


def check_logits(decoder: Decoder, loaded: LoadedModel, backend: _Cached) -> None:
    """Raise ModelUnsupported if the logits of a few tokens are NaN or infinite: each answer would be one token.

    Logits of tokens that a model never gives may be minus infinity. Overwrites the first blocks of the cache, which
    must be free.
    """
    token_ids, places, batch = _prompt(loaded, backend)
    with torch.inference_mode():
        largest = decoder.logits(token_ids, places, places, batch).float().amax(dim=1)  # NaN is the largest
    wrong = int((~largest.isfinite()).sum())
    if wrong:
        name, kind = loaded.folder.name if loaded.folder else "the model", dtype_name(loaded.dtype)
        raise ModelUnsupported(
            f"{name}: its logits are not finite at {wrong} of {len(largest)} tokens in {kind}: its weights or numbers "
            "of its configuration are wrong, or too large for this type"
        )


def replays(recorded: Decoder, launched: Decoder, loaded: LoadedModel, backend: _Cached, sequences: int) -> bool:
    """Return True if recorded and launched steps give nearly equal logits; otherwise log a warning.

    Compares steps of one sequence and of `sequences`, whose tokens, lengths and padding are not those of the recording.
    Overwrites the first blocks of the cache, which must be free.
    """
    token_ids, positions, prompt = _prompt(loaded, backend)
    with torch.inference_mode():
        launched.logits(token_ids, positions, positions[-1:], prompt)
        steps = [_decoding_step(token_ids, positions, prompt, count) for count in (1, min(sequences, len(token_ids)))]
        return _replayed("recorded steps", recorded, launched, steps)


def replays_prompts(
    recorded: Decoder, launched: Decoder, loaded: LoadedModel, backend: _Cached, sizes: Sequence[int]
) -> bool:
    """Return True if recorded steps with prompts give nearly the logits of the same launched; otherwise log a warning.

    Compares a step of each number of tokens that was recorded, less one for padding: whole prompts, their ends, and
    single tokens. Overwrites the first blocks of the cache, which must be free.
    """
    token_ids, positions, prompt = _prompt(loaded, backend)
    with torch.inference_mode():
        launched.logits(token_ids, positions, positions[-1:], prompt)
        steps = (_mixed_step(token_ids, prompt, max(1, size - 1)) for size in sizes)
        return _replayed("recorded prompts", recorded, launched, steps)


def _replayed(name: str, recorded: Decoder, launched: Decoder, steps: Iterable[_Step]) -> bool:
    """Return True if both decoders give nearly the same logits in all steps, otherwise log a warning.

    Runs all steps, because the ranks of a model must run the same ones whatever each of them finds.
    """
    rows = []
    for step in steps:
        found, expected = (one.logits(*step).float() for one in (recorded, launched))
        # Logits of a padding token may all be equal. NaN of ours is found, because it is below no number.
        rows.append(_apart(found, expected)[expected.std(dim=1) > 0])
    compared = torch.cat(rows)
    apart = float(compared.max()) if len(compared) else 0.0
    if not apart < _MAX_DIFFERENCE:
        log.warning("%s are not used for this model: their logits differ by %.2g", name, apart)
        return False
    return True


def _mixed_step(token_ids: torch.Tensor, prompt: PagedBatch, tokens: int) -> _Step:
    """Return a step of this many tokens: the whole prompt, its end, and its last token, repeated in turn."""
    table, most, device = tuple(prompt.tables[0].tolist()), len(token_ids), token_ids.device
    windows = len(prompt.windows)
    work: list[Work] = []
    for wanted in cycle((most, most // 3 + 1, 1)):
        if tokens <= 0:
            break
        count = min(wanted, tokens)
        work.append(_work(most - wanted, count, table, windows))
        tokens -= count
    positions = torch.cat([torch.arange(item.start, item.end, device=device) for item in work])
    batch = PagedBatch.of(work, prompt.block_size, device)
    last = batch.first[1:].long() - 1
    return token_ids[positions], positions, last[-_COMPARED_ROWS:], batch


def _decoding_step(token_ids: torch.Tensor, positions: torch.Tensor, prompt: PagedBatch, rows: int) -> _Step:
    """Return a step with one sequence for each of the prompt's last tokens, which computes that token again."""
    table, fed = tuple(prompt.tables[0].tolist()), len(token_ids)
    work = [_work(position, 1, table, len(prompt.windows)) for position in range(fed - rows, fed)]
    batch = PagedBatch.of(work, prompt.block_size, token_ids.device)
    return token_ids[-rows:], positions[-rows:], torch.arange(rows, device=token_ids.device), batch


def _apart(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the difference of each row of logits relative to its standard deviation."""
    return (found - expected).square().mean(dim=1).sqrt() / expected.std(dim=1)


def _difference(ours: Decoder, modules: Decoder, loaded: LoadedModel, backend: _Cached) -> float:
    """Return the difference of the logits relative to their standard deviation: the median over a few tokens."""
    token_ids, places, batch = _prompt(loaded, backend)
    with torch.inference_mode():
        theirs, found = (one.logits(token_ids, places, places, batch).float() for one in (modules, ours))
        return float(_apart(found, theirs).nanmedian())  # logits of a padding token may all be equal


def _prompt(loaded: LoadedModel, backend: _Cached) -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
    """Return a few tokens, their positions, and the batch that writes them into the first blocks."""
    block_size, device = backend.block_size, backend.cache.device
    kinds = backends_of(backend)
    count = min(CHECKED_TOKENS, loaded.context_tokens, (min(len(one.cache) for one in kinds) - 1) * block_size)
    token_ids = torch.tensor([7919 * number % loaded.vocabulary_size for number in range(count)], device=device)
    table = tuple(range(1, blocks_for(count, block_size) + 1))
    batch = PagedBatch.of([_work(0, count, table, len(kinds) - 1)], block_size, device)
    return token_ids, torch.arange(count, device=device), batch


def _work(start: int, count: int, table: tuple[int, ...], windows: int = 0) -> Work:
    return Work(1, (0,) * count, start, table, True, Sampling(), window_tables=(table,) * windows)
