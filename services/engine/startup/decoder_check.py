"""Whether a decoder of our own computes what a model's modules do."""

import logging
from typing import Protocol

import torch

from blocks import blocks_for
from engine.attention.backend import PagedBatch
from engine.model.decoder import Decoder
from engine.model.loading import LoadedModel
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work

# Both round, and not at the same places: logits differ by some hundredths of their spread, at single tokens by more.
_MOST_DIFFERENCE = 0.2
_TRIED_TOKENS = 24

log = logging.getLogger("quire.engine")


class _Cached(Protocol):
    block_size: int
    cache: torch.Tensor


def run_a_prompt_and_a_token(decoder: Decoder, loaded: LoadedModel, backend: _Cached) -> None:
    """Have compiled what steps need, before anybody waits for it. The first blocks of the cache are written."""
    prompt, positions, batch = _prompt(loaded, backend)
    last = positions[-1:]
    table = tuple(batch.tables[0].tolist())
    one = PagedBatch.of([_work(int(last), 1, table)], backend.block_size, backend.cache.device)
    with torch.inference_mode():
        decoder.logits(prompt, positions, last, batch)
        decoder.logits(prompt[-1:], last, torch.zeros_like(last), one)


def agrees(name: str, ours: Decoder, modules: Decoder, loaded: LoadedModel, backend: _Cached) -> bool:
    """Return whether both give a few tokens about the same logits; if not, say so of what is called `name`.

    The first blocks of the cache are written: nobody may hold any yet.
    """
    apart = _difference(ours, modules, loaded, backend)
    if not apart < _MOST_DIFFERENCE:
        log.warning("%s does not run this model: its logits are %.2g off", name, apart)
        return False
    return True


def _difference(ours: Decoder, modules: Decoder, loaded: LoadedModel, backend: _Cached) -> float:
    """Return how far the logits of both are apart, relative to how far they spread: the median of a few tokens."""
    token_ids, places, batch = _prompt(loaded, backend)
    with torch.inference_mode():
        theirs, found = (one.logits(token_ids, places, places, batch).float() for one in (modules, ours))
        apart = (found - theirs).square().mean(dim=1).sqrt() / theirs.std(dim=1)
        return float(apart.nanmedian())  # a token of padding may have logits that are all the same


def _prompt(loaded: LoadedModel, backend: _Cached) -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
    """Return a few tokens, their positions, and the batch that feeds them into the first blocks."""
    block_size, device = backend.block_size, backend.cache.device
    count = min(_TRIED_TOKENS, loaded.context_tokens, (len(backend.cache) - 1) * block_size)
    token_ids = torch.tensor([7919 * number % loaded.vocabulary_size for number in range(count)], device=device)
    table = tuple(range(1, blocks_for(count, block_size) + 1))
    batch = PagedBatch.of([_work(0, count, table)], block_size, device)
    return token_ids, torch.arange(count, device=device), batch


def _work(start: int, count: int, table: tuple[int, ...]) -> Work:
    return Work(1, (0,) * count, start, table, True, Sampling())
