"""Whether a decoder of our own computes what a model's modules do."""

import torch

from engine.attention.backend import PagedBatch
from engine.decoder import Decoder
from engine.model import LoadedModel
from engine.plan import Work
from engine.request import Sampling

_TRIED_TOKENS = 24


def difference(ours: Decoder, modules: Decoder, loaded: LoadedModel, block_size: int, blocks: int) -> float:
    """Return how far the logits of both are apart, relative to how far they spread: the median of a few tokens.

    The first of `blocks` blocks are written: nobody may hold any yet.
    """
    count = min(_TRIED_TOKENS, loaded.context_tokens, blocks * block_size)
    device: torch.device = loaded.model.device
    token_ids = torch.tensor([7919 * number % loaded.vocabulary_size for number in range(count)], device=device)
    table = tuple(range(1, -(-count // block_size) + 1))
    batch = PagedBatch.of([Work(1, (0,) * count, 0, table, True, Sampling())], block_size, device)
    places = torch.arange(count, device=device)
    with torch.inference_mode():
        theirs, found = (one.logits(token_ids, places, places, batch).float() for one in (modules, ours))
        apart = (found - theirs).square().mean(dim=1).sqrt() / theirs.std(dim=1)
        return float(apart.nanmedian())  # a token of padding may have logits that are all the same
