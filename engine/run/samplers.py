"""The sampler of a device: Triton kernels on a GPU, torch elsewhere."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Protocol

import torch

from engine.run.sampling import Draw, sample_on_device


class Sampler(Protocol):
    """Samples the rows of one step after the other."""

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """Return `[rows]` int64 token ids for `[rows, vocabulary]` logits, on the same device."""


class TorchSampler:
    """Samples with torch's operators; the rules of each draw have all tokens that they depend on."""

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """Return `[rows]` int64 token ids for `[rows, vocabulary]` logits, on the same device."""
        return sample_on_device(logits, draws)


def sampler_for(device: torch.device, sequences: int, vocabulary: int) -> Sampler:
    """Return the sampler for steps of at most `sequences` sequences."""
    if device.type == "cuda" and find_spec("triton"):
        from engine.run.device_sampler import DeviceSampler

        return DeviceSampler(sequences, vocabulary, device)
    return TorchSampler()
