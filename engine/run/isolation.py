"""Finds out which requests a failure of the sampling belongs to, so that the others get their tokens."""

from collections.abc import Callable, Sequence

import torch

from engine.schedule.step_plan import Sampled, Work

Sampler = Callable[[torch.Tensor, Sequence[Work]], list[Sampled]]


def sample_separately(
    logits: torch.Tensor, work: Sequence[Work], sampler: Sampler, failure: Exception
) -> list[Sampled]:
    """Return what the logits of a step bring where sampling them together raised `failure`: each work by itself.

    No row depends on another, so whoever can be sampled gets the tokens that it would have had. A Sampled of the others
    has the fault. Raises the failure where not even the largest logits can be found: then it is the device's.
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
