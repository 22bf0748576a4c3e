"""What transformers itself generates, and where an answer differs from it.

Two greedy runs in float32 may add the same numbers in another order, so where the reference's own logits of two tokens
are nearly equal, either is right. Such places are found, counted, and not hidden: `near_ties`.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from engine.request import BeamSearch

NEAR_TIE = 1e-4


class Difference(NamedTuple):
    """Where an answer leaves the reference: its place among the generated tokens, both tokens (None: the end), and how
    much larger the reference's logit of its own token is; infinite where only one of them ends.
    """

    place: int
    token: int | None
    reference: int | None
    gap: float


@functools.cache
def reference_model(folder: Path) -> Any:
    """Load a model with transformers' own eager attention, in float32, without the checkpoint's generation defaults."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    model.generation_config = GenerationConfig()
    return model.eval()


def greedy_reference(
    folder: Path, prompts: Iterable[Sequence[int]], max_tokens: int, eos_token_ids: Iterable[int] = ()
) -> list[list[int]]:
    """Return the new tokens of `generate` for each prompt by itself, the token that ends it included.

    Without `eos_token_ids` nothing but `max_tokens` ends it. Computed once for all tests.
    """
    ends = frozenset(eos_token_ids)
    return [list(_generated(folder, tuple(prompt), max_tokens, ends)) for prompt in prompts]


def differences(
    folder: Path, prompt: Sequence[int], tokens: Sequence[int], max_tokens: int, eos_token_ids: Iterable[int] = ()
) -> list[Difference]:
    """Compare the tokens of an answer with the reference; after each difference, go on from the answer's own token."""
    ends = frozenset(eos_token_ids)
    found: list[Difference] = []
    done = 0
    while done < max_tokens and not (done and tokens[done - 1] in ends):
        expected = _generated(folder, (*prompt, *tokens[:done]), max_tokens - done, ends)
        rest = tokens[done:]
        if list(rest) == list(expected):
            return found
        same = next((i for i, pair in enumerate(zip(rest, expected, strict=False)) if pair[0] != pair[1]), None)
        if same is None:
            place = done + min(len(rest), len(expected))
            found.append(Difference(place, _at(tokens, place), _at(expected, place - done), math.inf))
            return found
        gap = abs(_gap(folder, (*prompt, *tokens[: done + same]), expected[same], rest[same]))
        found.append(Difference(done + same, rest[same], expected[same], gap))
        done += same + 1
    if len(tokens) > done:
        found.append(Difference(done, tokens[done], None, math.inf))
    return found


def near_ties(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    max_tokens: int,
    eos_token_ids: Iterable[int] = (),
) -> int:
    """Check that all answers equal the reference but for near ties; return how many of those there are."""
    ends = frozenset(eos_token_ids)
    count = 0
    for number, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True)):
        for difference in differences(folder, prompt, tokens, max_tokens, ends):
            assert difference.gap < NEAR_TIE, f"prompt {number} of {len(prompt)} tokens: {difference}"
            count += 1
    return count


class BeamAnswers(NamedTuple):
    """What a beam search answers, best first: new tokens, the one that ends it included, and scores."""

    token_ids: list[list[int]]
    scores: list[float]


def beam_reference(
    folder: Path, prompt: Sequence[int], search: BeamSearch, max_tokens: int, count: int, **rest: Any
) -> BeamAnswers:
    """Return the best `count` answers of transformers' beam search; `rest` is of its GenerationConfig."""
    model = reference_model(folder)
    input_ids = torch.tensor([list(prompt)], device=model.device)
    settings = GenerationConfig(
        do_sample=False,
        num_beams=search.width,
        num_return_sequences=count,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        max_new_tokens=max_tokens,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **rest,
    )
    with torch.inference_mode():
        output = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=settings)
    ends = frozenset(rest.get("eos_token_id", ()))
    texts = [_until_end(row[len(prompt) :].tolist(), ends) for row in output.sequences]
    return BeamAnswers(texts, output.sequences_scores.tolist())


def reference_logprobs(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Return `[tokens - 1, vocabulary]`: how likely transformers finds each token after each beginning of a text."""
    model = reference_model(folder)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0, :-1]
    return logits.log_softmax(dim=-1)


@functools.cache
def _generated(folder: Path, prompt: tuple[int, ...], max_tokens: int, ends: frozenset[int]) -> tuple[int, ...]:
    model = reference_model(folder)
    input_ids = torch.tensor([prompt], device=model.device)
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=max_tokens, eos_token_id=sorted(ends) or None, pad_token_id=0
    )
    with torch.inference_mode():
        output = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=settings)
    return tuple(output[0, len(prompt) :].tolist())


def _until_end(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """Leave out what fills an answer up to the length of the longest."""
    end = next((place for place, token in enumerate(tokens, 1) if token in ends), len(tokens))
    return tokens[:end]


def _gap(folder: Path, tokens: tuple[int, ...], better: int, worse: int) -> float:
    model = reference_model(folder)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0, -1]
    return float(logits[better] - logits[worse])


def _at(tokens: Sequence[int], place: int) -> int | None:
    return tokens[place] if place < len(tokens) else None
