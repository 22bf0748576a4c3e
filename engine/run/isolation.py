"""Finds the requests that a sampling failure belongs to, so that the others get their tokens."""

from collections.abc import Callable, Sequence

import torch

from engine.schedule.step_plan import Sampled, Work

Sampler = Callable[[torch.Tensor, Sequence[Work]], list[Sampled]]


def sample_separately(
    logits: torch.Tensor, work: Sequence[Work], sampler: Sampler, failure: Exception
) -> list[Sampled]:
    """Return the results of a step whose batched sampling raised `failure`: each request is sampled separately.

    Rows are independent, so the other requests get the same tokens. The Sampled of a failed request has the fault.
    Raises `failure` if even an argmax fails, because then the device failed.
    """
    try:
        logits.argmax(dim=-1).tolist()
    except Exception:
        raise failure from None
    results: list[Sampled] = []
    first = 0
    for item in work:
        rows = logits[first : first + item.outcomes]
        first += item.outcomes
        try:
            results += sampler(rows, [item])
        except Exception as fault:
            results += [Sampled(0, fault=fault)] * item.outcomes
    return results
