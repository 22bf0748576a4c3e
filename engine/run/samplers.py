"""The sampler of a device: Triton kernels on a GPU, native kernels on a CPU, torch elsewhere."""

from collections.abc import Sequence
from importlib.util import find_spec
from struct import Struct
from typing import Protocol

import torch

from engine.gpu.current_device import on_device
from engine.native.kernels import Kernels
from engine.run.sampling import MAX_TEMPERATURE, MIN_TEMPERATURE, Draw, row_states, sample_on_device
from engine.schedule.request import Sampling

# RowDraw of engine/native/x86/sampler.h: state of the noise; temperature, top_p, min_p, top_n_sigma; top_k.
_ROW_DRAW = Struct("<Q4fi4x")
_MOST_TOP_K = (1 << 31) - 1  # of the kernels: larger than any vocabulary


class Sampler(Protocol):
    """Samples the rows of one step after the other."""

    @property
    def counts_tokens(self) -> bool:
        """Whether it counts the tokens of penalized sequences itself.

        Then the rules of a draw one position after the sequence's last draw need no tokens.
        """

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """Return `[rows]` int64 token ids for `[rows, vocabulary]` logits, on the same device."""


class TorchSampler:
    """Samples with torch's operators; the rules of each draw have all tokens that they depend on."""

    counts_tokens = False

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """Return `[rows]` int64 token ids for `[rows, vocabulary]` logits, on the same device."""
        return sample_on_device(logits, draws)


class NativeSampler:
    """Samples on a CPU with native kernels, which neither sort nor compute the noise of every token."""

    counts_tokens = False

    def __init__(self, kernels: Kernels, threads: int = 0) -> None:
        """0 threads means as many as torch uses."""
        self._kernels = kernels
        self._threads = threads or torch.get_num_threads()

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """Return `[rows]` int64 token ids for `[rows, vocabulary]` logits."""
        return sample_on_device(logits, draws, self._sample_rows)

    def _sample_rows(self, logits: torch.Tensor, rows: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
        states = row_states(draws)
        packed = [_ROW_DRAW.pack(state, *_parameters(draw.sampling)) for state, draw in zip(states, draws, strict=True)]
        return self._kernels.sample(logits.contiguous(), b"".join(packed), rows, self._threads)


def _parameters(sampling: Sampling) -> tuple[float, float, float, float, int]:
    temperature = min(max(sampling.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)
    top_k = min(sampling.top_k, _MOST_TOP_K)
    return temperature, sampling.top_p, sampling.min_p, sampling.top_n_sigma, top_k


class StepSampler:
    """The sampler of one step. Sampled again by request after a failure, its rows keep the tokens drawn first.

    Else a sampler that counts tokens would count those of the other requests twice.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._drawn: list[tuple[Sequence[Draw], torch.Tensor]] = []

    @property
    def counts_tokens(self) -> bool:
        """See Sampler."""
        return self._sampler.counts_tokens

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """Return `[rows]` int64 token ids for `[rows, vocabulary]` logits, on the same device."""
        for before, tokens in self._drawn:
            if draws[0] in before:  # those of a request stand together, and its sequence names the first one
                place = before.index(draws[0])
                return tokens[place : place + len(draws)]
        drawn = self._sampler.sample(logits, draws)
        self._drawn.append((draws, drawn))
        return drawn


def sampler_for(
    device: torch.device, sequences: int, vocabulary: int, dtype: torch.dtype, kernels: Kernels | None = None
) -> Sampler:
    """Return the sampler for steps of at most `sequences` sequences and logits of `dtype`, with compiled kernels.

    `kernels` are those of the CPU, None without any.
    """
    if device.type == "cuda" and find_spec("triton"):
        from engine.run.device_sampler import DeviceSampler

        sampler = DeviceSampler(sequences, vocabulary, device)
        with on_device(device):
            sampler.compile(dtype)
        return sampler
    return NativeSampler(kernels) if kernels and device.type == "cpu" else TorchSampler()
