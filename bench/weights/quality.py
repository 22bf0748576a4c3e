"""Perplexity, greedy tokens and log-probabilities of each form of weights, beside float32."""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch

from bench.engine.perplexity import perplexity
from bench.loads.peer import PEERS, Peer, Worker
from bench.report.results import Row, row
from bench.report.terms import Terms

WINDOWS, WINDOW_TOKENS = 10, 1024
CONTINUATIONS, PROMPT_TOKENS = 16, 64
# Where tokens differ first: float32 gives both nearly the same log-probability.
NEAR_TIE = 0.1

# Rows with targets.
COMPARISONS = (
    "int8_perplexity_difference",
    "int8_kv_perplexity_difference",
    "int4_perplexity_over_llamacpp_as_users_run_it",
)

Texts = Sequence[Sequence[int]]
# Log-probabilities of the tokens of each window but the first.
Windows = Sequence[Sequence[float]]


class Reference(NamedTuple):
    """What float32 answers: greedy tokens of each prompt, and their log-probabilities."""

    prompts: Texts
    tokens: Texts
    logprobs: Sequence[Sequence[float]]

    @property
    def texts(self) -> list[list[int]]:
        """Prompts with their greedy tokens."""
        return [[*prompt, *tokens] for prompt, tokens in zip(self.prompts, self.tokens, strict=True)]


class Scored(NamedTuple):
    """Log-probabilities of the windows' tokens but the first by another program, its name, and its terms.

    Without the first and last, the name says why it did not run.
    """

    logprobs: list[list[float]] | None
    name: str
    terms: Terms | None


class Difference(NamedTuple):
    """The first different token of a continuation: its place, and float32's log-probability of it beside its own."""

    place: int
    token: int
    gap: float


def reference_of(engine: Worker, windows: Texts) -> Reference:
    """Continue the beginning of each text, and of its second half, in float32."""
    halves = [window[start:] for window in windows for start in (0, len(window) // 2)]
    prompts = [half[:PROMPT_TOKENS] for half in halves][:CONTINUATIONS]
    tokens = engine.measure(json.dumps({"continue": prompts}))["tokens"]
    texts = [[*prompt, *more] for prompt, more in zip(prompts, tokens, strict=True)]
    scored = engine.measure(json.dumps({"score": texts}))["logprobs"]
    return Reference(prompts, tokens, [one[len(prompt) - 1 :] for prompt, one in zip(prompts, scored, strict=True)])


def measured(engine: Worker, windows: Texts, reference: Reference) -> dict[str, Any]:
    """Return what an engine answers: log-probabilities of windows and of float32's tokens, and its greedy tokens."""
    scored = engine.measure(json.dumps({"score": [*windows, *reference.texts]}))["logprobs"]
    texts = zip(reference.prompts, scored[len(windows) :], strict=True)
    return {
        "windows": scored[: len(windows)],
        "logprobs": [one[len(prompt) - 1 :] for prompt, one in texts],
        "tokens": engine.measure(json.dumps({"continue": reference.prompts}))["tokens"],
    }


def differences_of(float32: Worker, reference: Reference, tokens: Texts) -> list[Difference | None]:
    """Return where continuations differ from float32's first, None where they do not."""
    places = [first_difference(own, other) for own, other in zip(reference.tokens, tokens, strict=True)]
    texts = [
        [*prompt, *other[: place + 1]]
        for prompt, other, place in zip(reference.prompts, tokens, places, strict=True)
        if place is not None
    ]
    scored = iter(float32.measure(json.dumps({"score": texts}))["logprobs"] if texts else [])
    return [
        None if place is None else Difference(place, other[place], own[place] - next(scored)[-1])
        for own, other, place in zip(reference.logprobs, tokens, places, strict=True)
    ]


def perplexity_of(windows: Windows) -> float:
    """Return the perplexity of windows."""
    return perplexity([sum(one) for one in windows], len(windows[0]) + 1)


def first_difference(own: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the place of the first different token, None without one."""
    return next((place for place, pair in enumerate(zip(own, other, strict=True)) if pair[0] != pair[1]), None)


def rows_of(form: str, found: Mapping[str, Any], reference: Reference, terms: Mapping[str, Terms]) -> list[Row]:
    """Return the rows of a form: perplexity, greedy agreement, and errors of log-probabilities.

    `terms` are by form. Errors are those of the form: the rows have its terms.
    """
    differing: Sequence[Difference | None] = found["differences"]
    total = sum(len(one) for one in reference.tokens)
    equal = sum(
        len(tokens) if one is None else one.place for tokens, one in zip(reference.tokens, differing, strict=True)
    )
    errors = [
        abs(own - other)
        for pair in zip(reference.logprobs, found["logprobs"], strict=True)
        for own, other in zip(*pair, strict=True)
    ]
    own = {form: replace(terms[form], work=f"{len(found['windows'])} windows")} if form in terms else {}
    ties = sum(one is not None and one.gap < NEAR_TIE for one in differing)
    return [
        row("weights", f"{form}_perplexity", round(perplexity_of(found["windows"]), 4), "1", terms=own),
        row("weights", f"{form}_greedy_agreement", round(equal / total, 4), "share", "float32", terms=own),
        row(
            "weights", f"{form}_first_differences", sum(one is not None for one in differing), "1", "float32", terms=own
        ),
        row("weights", f"{form}_near_ties", ties, "1", "float32", terms=own),
        row("weights", f"{form}_mean_logprob_error", round(mean(errors), 5), "1", "float32", terms=own),
        row("weights", f"{form}_largest_logprob_error", round(max(errors), 4), "1", "float32", terms=own),
    ]


def comparisons(windows: Mapping[str, Windows], llamacpp: Scored, terms: Mapping[str, Terms]) -> list[Row]:
    """Return the rows of perplexities compared: with bfloat16, and of the 4-bit file with llama.cpp's.

    Each has a standard error, over the windows' tokens. `terms` are by form.
    """
    known = dict(terms) | ({"llamacpp": llamacpp.terms} if llamacpp.terms else {})
    sides = {label: replace(one, work=f"{WINDOWS} windows") for label, one in known.items()}
    theirs, name = llamacpp.logprobs, llamacpp.name
    found = [(COMPARISONS[-1], over(windows["int4"], theirs) if theirs else (None, None), "ratio", name, "llamacpp")]
    for metric in COMPARISONS[:-1]:
        ratio, error = over(windows[metric.removesuffix("_perplexity_difference")], windows["bf16"])
        found.append((metric, (abs(ratio - 1), error), "share", "bfloat16", "bf16"))
    value = round(perplexity_of(theirs), 4) if theirs else None
    rows = [row("weights", "llamacpp_perplexity", value, "1", name)]
    for metric, (value, spread), unit, peer, label in found:
        both = {one: sides[one] for one in (metric.partition("_perplexity")[0], label) if one in sides}
        rows.append(row("weights", metric, value and round(value, 6), unit, peer, terms=both))
        rows.append(row("weights", f"{metric}_standard_error", spread and round(spread, 6), unit, peer, terms=both))
    return rows


def over(ours: Windows, theirs: Windows) -> tuple[float, float]:
    """Return the ratio of two perplexities of the same tokens, and its standard error."""
    pairs = zip(chain.from_iterable(ours), chain.from_iterable(theirs), strict=True)
    differences = [their - own for own, their in pairs]
    ratio = math.exp(mean(differences))
    return ratio, ratio * stdev(differences) / math.sqrt(len(differences))


def llamacpp_logprobs(windows: Texts) -> Scored:
    """Return what llama.cpp answers for the windows."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "logits"
        script = PEERS / "llamacpp_logits.py"
        try:
            with Peer(script, "QUIRE_LLAMACPP_PYTHON", {"file": str(file)}, model="LLAMACPP_MODEL") as peer:
                if peer.name is None:
                    return Scored(None, peer.missing, None)
                found = []
                for window in windows:
                    shape = peer.measure(json.dumps(window))
                    assert shape is not None
                    found.append(_logprobs(file, shape["vocabulary"], window))
                return Scored(found, peer.name, peer.terms("")["llamacpp"])
        except RuntimeError as failure:
            return Scored(None, str(failure), None)


def _logprobs(file: Path, vocabulary: int, window: Sequence[int]) -> list[float]:
    """Return the log-probabilities of a text's tokens but the first, from a file of float32 logits of each place."""
    logits = torch.from_file(str(file), size=len(window) * vocabulary, dtype=torch.float32).view(len(window), -1)
    wanted = torch.tensor(window[1:])[:, None]
    found: list[float] = logits[:-1].log_softmax(dim=-1).gather(-1, wanted)[:, 0].tolist()
    return found
