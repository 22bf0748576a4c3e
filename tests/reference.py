"""Reference answers of transformers, and comparisons with them.

Two greedy runs in float32 may add the same numbers in different orders. Where the reference's logits of two tokens are
nearly equal, either token is right: a near tie. These are counted.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    RepetitionPenaltyLogitsProcessor,
)

from engine.native.formats.image_text import image_text_type
from engine.schedule.request import BeamSearch, LogitRules
from tests.dense_model import dense_folder

NEAR_TIE = 1e-4


class Difference(NamedTuple):
    """Where an answer differs from the reference: the place, and both tokens (None: the end).

    `gap` is the difference of the reference's logits of both tokens, infinite where only one text ends.
    """

    place: int
    token: int | None
    reference: int | None
    gap: float


@functools.cache
def reference_model(folder: Path) -> Any:
    """Load a model in float32 with eager attention, and without the checkpoint's generation defaults.

    Of image-text checkpoints it is the whole model.
    """
    kind = AutoModelForImageTextToText if image_text_type(folder) else AutoModelForCausalLM
    model = kind.from_pretrained(
        dense_folder(folder), dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    model.generation_config = GenerationConfig()
    return model.eval()


def greedy_reference(
    folder: Path, prompts: Iterable[Sequence[int]], max_tokens: int, eos_token_ids: Iterable[int] = ()
) -> list[list[int]]:
    """Return the new tokens of `generate` for each prompt alone, including the stop token; cached for all tests."""
    ends = frozenset(eos_token_ids)
    return [list(_generated(folder, tuple(prompt), max_tokens, ends)) for prompt in prompts]


def differences(
    folder: Path, prompt: Sequence[int], tokens: Sequence[int], max_tokens: int, eos_token_ids: Iterable[int] = ()
) -> list[Difference]:
    """Compare the tokens of an answer with the reference; after a difference, continue from the answer's token."""
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
    """Check that all answers equal the reference except for near ties, and count those."""
    ends = frozenset(eos_token_ids)
    count = 0
    for number, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True)):
        for difference in differences(folder, prompt, tokens, max_tokens, ends):
            assert difference.gap < NEAR_TIE, f"prompt {number} of {len(prompt)} tokens: {difference}"
            count += 1
    return count


def near_ties_after_penalties(folder: Path, prompt: Sequence[int], tokens: Sequence[int], rules: LogitRules) -> int:
    """Check that each token is the likeliest after penalties, and count near ties.

    transformers has only the repetition penalty; the other two are subtracted here.
    """
    model, count = reference_model(folder), 0
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]], device=model.device), use_cache=False).logits[0]
    repetition = RepetitionPenaltyLogitsProcessor(rules.repetition_penalty)
    for place, token in enumerate(tokens):
        before = torch.tensor([[*prompt, *tokens[:place]]], device=model.device)
        row = repetition(before, logits[len(prompt) + place - 1][None])[0]
        times = torch.bincount(before[0, len(prompt) :], minlength=len(row))
        row = row - rules.frequency_penalty * times - rules.presence_penalty * (times > 0)
        gap = float(row.max() - row[token])
        assert gap < NEAR_TIE, f"prompt of {len(prompt)} tokens: the token at {place} is {gap} below the likeliest"
        count += int(row.argmax()) != token
    return count


class BeamAnswers(NamedTuple):
    """Answers of a beam search, best first: new tokens including the stop token, and scores."""

    token_ids: list[list[int]]
    scores: list[float]


def beam_reference(
    folder: Path,
    prompt: Sequence[int],
    search: BeamSearch,
    max_tokens: int,
    count: int,
    allowed: Callable[[int, torch.Tensor], list[int]] | None = None,
    **rest: Any,
) -> BeamAnswers:
    """Return the best `count` answers of transformers' beam search.

    `allowed` returns the tokens that can follow a text; `rest` are fields of GenerationConfig.
    """
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
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=settings,
            prefix_allowed_tokens_fn=allowed,
        )
    ends = frozenset(rest.get("eos_token_id", ()))
    texts = [_until_end(row[len(prompt) :].tolist(), ends) for row in output.sequences]
    return BeamAnswers(texts, output.sequences_scores.tolist())


def beam_near_ties(
    folder: Path, prompt: Sequence[int], search: BeamSearch, answers: BeamAnswers, expected: BeamAnswers
) -> int:
    """Check that a search's answers and scores equal the reference's, and count different answers.

    A different answer must be a near tie: its score equals the reference's score of its tokens, and the score of the
    reference's answer of the same rank.
    """
    assert len(answers.token_ids) == len(expected.token_ids)
    different = 0
    for rank, tokens in enumerate(answers.token_ids):
        gap = abs(answers.scores[rank] - expected.scores[rank])
        assert gap < NEAR_TIE, f"prompt of {len(prompt)} tokens, answer {rank}: its score differs by {gap}"
        if tokens != expected.token_ids[rank]:
            rows = reference_logprobs(folder, [*prompt, *tokens])[len(prompt) - 1 :]
            logprob = float(rows.gather(-1, torch.tensor(tokens)[:, None]).sum())
            assert abs(logprob / len(tokens) ** search.length_penalty - answers.scores[rank]) < NEAR_TIE
            different += 1
    return different


def reference_logprobs(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Return log-probabilities `[tokens - 1, vocabulary]`: row i is of the token after the first i + 1."""
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
    end = next((place for place, token in enumerate(tokens, 1) if token in ends), len(tokens))
    return tokens[:end]


def _gap(folder: Path, tokens: tuple[int, ...], better: int, worse: int) -> float:
    model = reference_model(folder)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0, -1]
    return float(logits[better] - logits[worse])


def _at(tokens: Sequence[int], place: int) -> int | None:
    return tokens[place] if place < len(tokens) else None
