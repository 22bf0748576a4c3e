"""Samples on a GPU with Triton kernels: the same tokens as engine.run.sampling, near ties aside.

Temperature, noise and argmax are one pass over the logits, in their own type; top_k, top_p and min_p take two more and
no sort, top_n_sigma another two. Token counts for penalties stay on the device, so penalized sequences need no tokens
from the host.
"""

import struct
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.upload import upload
from engine.run.logit_rules import MAX_LOGIT, apply_rules, changes_logits, without_penalties
from engine.run.sampling import MAX_TEMPERATURE, MIN_TEMPERATURE, Draw, row_states
from engine.run.token_counts import TokenCounts
from engine.schedule.request import LogitRules, Sampling
from engine.triton_kernels.sampling.launch import ROW_WORDS, Batch, choose_tokens

_ADVANCES = 1  # flag of a row: its token is added to the slot
# State of the noise; temperature, top_p, min_p; top_k; penalties; slot, source, place among filtered rows, flags;
# top_n_sigma.
_ROW = struct.Struct("<Q3fi3f4if")
assert _ROW.size == 4 * ROW_WORDS
_NO_PENALTIES = (1.0, 0.0, 0.0)
_NONE = -1  # no slot, no changed row, no filter


class DeviceSampler:
    """Samples rows of logits, and keeps the token counts of penalized sequences on the device.

    A sequence whose rules penalize gets a slot at its first draw, which reads `prompt` and `output` of its rules. Each
    draw with one sample adds its token to the slot. So the next draw, one position further, needs neither: while
    `holds(sequence, position)` is true both may be empty, which permits a step whose last token is still on the device.
    A draw at any other position, as after a preemption or a discarded step, reads them again.
    """

    counts_tokens = True

    def __init__(self, sequences: int, vocabulary: int, device: torch.device) -> None:
        """Allocate the counts of `sequences` sequences: the most that one step may have."""
        self._counts = TokenCounts(sequences, vocabulary, device)

    @torch.inference_mode()
    def compile(self, dtype: torch.dtype) -> None:
        """Launch the kernels for logits of this type, so that no request waits until they are compiled."""
        logits = torch.zeros(1, self._counts.table.shape[1], dtype=dtype, device=self._counts.table.device)
        for sampling in (Sampling(), Sampling(top_n_sigma=1.0)):
            self.sample(logits, [Draw(sampling, 0, 0)])

    def holds(self, sequence: int, position: int) -> bool:
        """Return whether the device has the counts of exactly the first `position` tokens of a sequence."""
        return self._counts.holds(sequence, position)

    def add(self, sequence: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Count a sequence's tokens anew, before its first draw needs them.

        Raises IndexError for a token outside the vocabulary; then nothing changes.
        """
        self._counts.add(sequence, prompt, output)

    def release(self, sequence: int) -> None:
        """Free the slot of a sequence. Not needed: the least recently used slot is reused if there is no other."""
        self._counts.release(sequence)

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """Return `[rows]` int64 token ids for `[rows, vocabulary]` logits of any float type, on their device.

        Does not synchronize with the device. Raises ValueError if a penalized sequence's tokens are neither on the
        device nor in its rules.
        """
        slots = self._slots_of(draws)
        advancing = _advancing(draws, slots)
        changed, sources = _changed_rows(logits, draws, slots)
        words, filtered = _packed(draws, slots, sources, advancing, logits.shape[-1])
        rows = upload(words, torch.int32, logits.device)
        spread = any(draw.sampling.top_n_sigma > 0 for draw in draws)
        tokens = choose_tokens(Batch(logits, rows, changed, self._counts.table, filtered, spread))
        for sequence in advancing:
            self._counts.advance(sequence)
        return tokens

    def _slots_of(self, draws: Sequence[Draw]) -> dict[int, int]:
        """Return the slot of each penalized sequence, with its tokens counted."""
        penalized = {draw.sequence: draw for draw in draws if draw.sequence is not None and _penalizes(draw)}
        for sequence, draw in penalized.items():
            if not self.holds(sequence, draw.position):
                assert draw.rules is not None, "it penalizes"
                prompt, output = draw.rules.prompt, draw.rules.output
                if len(prompt) + len(output) != draw.position:
                    raise ValueError(
                        f"sequence {sequence} has {len(prompt) + len(output)} tokens in its rules, not the "
                        f"{draw.position} that its penalties need, and the device has not counted them"
                    )
                self._counts.add(sequence, prompt, output, penalized)
        return {sequence: self._counts.use(sequence) for sequence in penalized}


def _penalizes(draw: Draw) -> bool:
    return draw.rules is not None and draw.rules.rules.penalizes


def _advancing(draws: Sequence[Draw], slots: Mapping[int, int]) -> set[int]:
    """Return the sequences with a slot that have one draw. Several samples of one sequence continue as others."""
    if not slots:
        return set()
    numbers = Counter(draw.sequence for draw in draws)
    return {sequence for sequence in slots if numbers[sequence] == 1}


def _changed_rows(
    logits: torch.Tensor, draws: Sequence[Draw], slots: Mapping[int, int]
) -> tuple[torch.Tensor | None, dict[int, int]]:
    """Return float32 copies of the rows that other rules than counted penalties change, and the place of each row."""
    rules = {
        row: draw.rules if draw.sequence not in slots else without_penalties(draw.rules)
        for row, draw in enumerate(draws)
        if draw.rules is not None
    }
    affected = {row: one for row, one in rules.items() if changes_logits(one)}
    if not affected:
        return None, {}
    places = upload(list(affected), torch.int64, logits.device)
    changed = apply_rules(logits.index_select(0, places).float(), list(affected.values()))
    return changed, {row: place for place, row in enumerate(affected)}


def _packed(
    draws: Sequence[Draw],
    slots: Mapping[int, int],
    sources: Mapping[int, int],
    advancing: Collection[int],
    vocabulary: int,
) -> tuple[NDArray[np.int32], int]:
    """Return `[rows, ROW_WORDS]` int32 parameters, and the number of rows with filters."""
    packed = bytearray(len(draws) * _ROW.size)
    filtered = 0
    for row, (draw, state) in enumerate(zip(draws, row_states(draws), strict=True)):
        slot = _NONE if draw.sequence is None else slots.get(draw.sequence, _NONE)
        parameters, top_k, filters = _parameters(draw.sampling, vocabulary)
        penalties = _NO_PENALTIES if slot == _NONE or draw.rules is None else _penalties(draw.rules.rules)
        place = filtered if filters else _NONE
        flags = _ADVANCES if draw.sequence in advancing else 0
        source = sources.get(row, _NONE)
        numbers = (state, *parameters, top_k, *penalties, slot, source, place, flags, draw.sampling.top_n_sigma)
        _ROW.pack_into(packed, row * _ROW.size, *numbers)
        filtered += filters
    return np.frombuffer(packed, dtype=np.int32).reshape(len(draws), ROW_WORDS), filtered


@lru_cache(maxsize=4096)
def _parameters(sampling: Sampling, vocabulary: int) -> tuple[tuple[float, float, float], int, bool]:
    """Return temperature (0: greedy), top_p and min_p, then top_k, and whether there is a filter."""
    if sampling.greedy:
        return (0.0, inf, 0.0), vocabulary, False
    top_p = sampling.top_p if sampling.top_p < 1 else inf
    top_k = min(sampling.top_k or vocabulary, vocabulary)
    filters = top_p < 1 or top_k < vocabulary or sampling.min_p > 0 or sampling.top_n_sigma > 0
    temperature = min(max(sampling.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)
    return (temperature, top_p, sampling.min_p), top_k, filters


@lru_cache(maxsize=4096)
def _penalties(rules: LogitRules) -> tuple[float, float, float]:
    repetition, others = rules.repetition_penalty, (rules.frequency_penalty, rules.presence_penalty)
    frequency, presence = (min(max(one, -MAX_LOGIT), MAX_LOGIT) for one in others)
    return min(max(repetition, 1 / MAX_LOGIT), MAX_LOGIT), frequency, presence
