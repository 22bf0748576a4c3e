"""Applies rules to logits, by earlier tokens or by token id, for all rows of a batch at once.

The order is that of vLLM's `Sampler`: first banned tokens (by constraint, allowed tokens, bad words and min_tokens),
then bias, then repetition penalty over prompt and output, then frequency and presence penalties over the output. So a
penalty scales a bias too. A rule costs only the rows that use it, and changes no other row.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.upload import upload
from engine.schedule.step_plan import RowRules

# Larger than any logit, and small enough that sums stay finite in float32.
MAX_LOGIT = 1e9

_Rule = tuple[Callable[[RowRules], bool], Callable[[torch.Tensor, list[RowRules]], torch.Tensor]]


def changes_logits(rules: RowRules) -> bool:
    """Return whether a row's rules change its logits."""
    return any(applies(rules) for applies, _ in _RULES)


def without_penalties(rules: RowRules) -> RowRules:
    """Return the rules that apply before penalties."""
    others = replace(rules.rules, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
    return rules._replace(rules=others, prompt=(), output=())


def apply_rules(logits: torch.Tensor, rules: Sequence[RowRules | None]) -> torch.Tensor:
    """Return `[rows, vocabulary]` float32 logits after each row's rules; `logits` is not modified."""
    for applies, apply in _RULES:
        affected = [(row, one) for row, one in enumerate(rules) if one is not None and applies(one)]
        if affected:
            rows = upload([row for row, _ in affected], torch.int64, logits.device)
            logits = logits.index_copy(0, rows, apply(logits[rows], [one for _, one in affected]))
    return logits


def _penalize(logits: torch.Tensor, rules: list[RowRules]) -> torch.Tensor:
    seen = [_seen(one) for one in rules]
    numbers = np.arange(len(rules)).repeat([len(tokens) for tokens, _ in seen])
    parts = numbers, *map(np.concatenate, zip(*seen, strict=True))
    rows, tokens, generated = (upload(part, torch.int64, logits.device) for part in parts)
    repetition = _column(logits, [max(one.rules.repetition_penalty, 1 / MAX_LOGIT) for one in rules])[rows, 0]
    frequency = _column(logits, [one.rules.frequency_penalty for one in rules])[rows, 0]
    presence = _column(logits, [one.rules.presence_penalty for one in rules])[rows, 0]
    values = logits[rows, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - generated * frequency - (generated > 0) * presence
    return logits.index_put((rows, tokens), values)


def _seen(rules: RowRules) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the different tokens of a row's prompt and output, and how often each is in the output."""
    prompt, output = (np.array(one, dtype=np.int64) for one in (rules.prompt, rules.output))
    tokens, places = np.unique(np.concatenate([prompt, output]), return_inverse=True)
    return tokens, np.bincount(places[len(prompt) :], minlength=len(tokens))


def _add_bias(logits: torch.Tensor, rules: list[RowRules]) -> torch.Tensor:
    tokens = _index(logits, [[token for token, _ in one.rules.logit_bias] for one in rules])
    biases = _column(logits, [bias for one in rules for _, bias in one.rules.logit_bias])[:, 0]
    return logits.index_put(tokens, biases, accumulate=True)


def _ban(logits: torch.Tensor, rules: list[RowRules]) -> torch.Tensor:
    vocabulary = logits.shape[-1]
    banned = upload([bool(one.rules.allowed_token_ids) for one in rules], torch.bool, logits.device)
    banned = banned[:, None].repeat(1, vocabulary)
    # Filled on the device: a number of the host would wait for it.
    yes, no = torch.ones_like(banned[0, 0]), torch.zeros_like(banned[0, 0])
    banned.index_put_(_index(logits, [one.rules.allowed_token_ids for one in rules]), no)
    # A model may declare end-of-sequence tokens outside its vocabulary.
    known = [[token for token in one.banned_token_ids if 0 <= token < vocabulary] for one in rules]
    banned.index_put_(_index(logits, known), yes)
    return logits.masked_fill(banned, float("-inf"))


def _apply_masks(logits: torch.Tensor, rules: list[RowRules]) -> torch.Tensor:
    vocabulary = logits.shape[-1]
    width = -(-vocabulary // 8)
    # The vocabulary of a mask may be smaller than the model's, whose other tokens are then banned, or larger.
    packed = bytearray().join(one.mask[:width].ljust(width, b"\0") for one in rules)
    masks = upload(np.frombuffer(packed, dtype=np.uint8), torch.uint8, logits.device).view(len(rules), width, 1)
    bits = masks >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
    return logits.masked_fill(bits.flatten(1)[:, :vocabulary] == 0, float("-inf"))


_RULES: tuple[_Rule, ...] = (
    (lambda one: bool(one.mask), _apply_masks),
    (lambda one: bool(one.rules.allowed_token_ids or one.banned_token_ids), _ban),
    (lambda one: bool(one.rules.logit_bias), _add_bias),
    (lambda one: one.rules.penalizes, _penalize),
)


def _index(logits: torch.Tensor, token_ids: Sequence[Collection[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row numbers and token ids of each row's tokens, as indices into `logits`."""
    rows = [row for row, tokens in enumerate(token_ids) for _ in range(len(tokens))]
    indices = np.array([rows, list(chain.from_iterable(token_ids))], dtype=np.int64)
    places = upload(indices, torch.int64, logits.device)
    return places[0], places[1]


def _column(logits: torch.Tensor, values: list[float]) -> torch.Tensor:
    bounded = [min(max(value, -MAX_LOGIT), MAX_LOGIT) for value in values]
    return upload(bounded, torch.float32, logits.device)[:, None]
