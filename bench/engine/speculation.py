"""Tokens per second with tokens proposed by n-grams, compared with the same requests without.

Three kinds of requests on the demo model in bfloat16, with the engine in process: `editing`, where the model is asked
to repeat a paragraph of docs/ and to change one word of it, so that most of the prompt comes back in the answer;
`ordinary`, which continues articles of newstest2014 with random choices; `greedy`, the same without. The last two need
newstest2014_en.txt in the folder QUIRE_DATA. The engine with proposals, the one without, and that once more run in
turn; only decoding is timed, from the first token of all requests on. Their tokens are compared: the first difference
is a near tie if both tokens had about the same score.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import tokenizers
import torch

from bench.loads.engine_worker import BFLOAT16, demo_parts, terms_of
from bench.loads.memory import DATA_VARIABLE
from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.targets import ROOT
from bench.report.terms import Terms
from bench.report.verdict import null_interval
from engine.run.loop import Engine
from engine.run.sampling import Draw, gumbel_noise
from engine.schedule.outputs import Scored, Tokens
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from services.engine.startup.assembly import EngineParts
from tests.in_process import InProcessBlocks

PROPOSED = 8
BATCHES = (1, 8, 32)
# More of the small batches, so that each repetition measures about as many tokens.
ROUNDS = {1: 6, 8: 3, 32: 1}
NEW_TOKENS = 96
REPETITIONS = 5
CODE = ("blocks", "engine", "kvmanager", "services/engine", "bench/engine/speculation.py")
DEVICE_BLOCKS = 2048
# Scores of two tokens that are closer than this are a near tie in bfloat16.
NEAR_TIE = 0.25
GREEDY = Sampling(temperature=0.0)
_PARAGRAPH = range(60, 110)  # tokens

Texts = Sequence[tuple[int, ...]]


@dataclass
class Side:
    """An engine with or without proposals, and what it measured, by kind and batch.

    All engines use the same cache tensor, one after the other.
    """

    scheduler: Scheduler
    engine: Engine
    rates: dict[tuple[str, int], list[float]] = field(default_factory=dict)  # tokens per second
    requests: dict[str, Request] = field(default_factory=dict)  # by id
    answers: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: EngineParts, proposed: int) -> "Side":
        """Return an engine that shares the model with others; all of them run one after the other."""
        limits = replace(parts.scheduler.limits, proposed_tokens=proposed)
        scheduler = Scheduler(parts.scheduler.capacity, limits)
        return cls(scheduler, Engine(scheduler, parts.runner, InProcessBlocks(scheduler.capacity), perf_counter))


def main() -> None:
    """Measure all kinds and batches in each repetition, and publish the medians of the pairs' ratios."""
    parts = demo_parts(DEVICE_BLOCKS, **BFLOAT16)
    kinds = kinds_of(Path(str(parts.loaded.folder)))
    sides = {"plain": Side.of(parts, 0), "again": Side.of(parts, 0), "proposing": Side.of(parts, PROPOSED)}
    plain, proposing = sides["plain"], sides["proposing"]
    cases = [(kind, batch) for kind in kinds for batch in BATCHES]
    shares: dict[tuple[str, int], tuple[int, int]] = {}
    for number in repeated(REPETITIONS, "speculation"):  # number 0 measures the steps of each batch
        for kind, batch in cases:
            before = _counted(proposing)
            for side in map(sides.__getitem__, in_turn([*sides], number)):
                rate = _measure(side, kind, batch, kinds[kind])
                side.rates.setdefault((kind, batch), []).extend([rate] if number else [])
            shares[kind, batch] = _difference(_counted(proposing), before)
    rates = {case: {name: side.rates[case] for name, side in sides.items()} for case in cases}
    rows = [one for case in cases for one in rows_of(case, rates[case], shares[case], terms_of(parts, ""))]
    rows += _compared(plain, proposing, terms_of(parts, "all answers of a repetition"))
    named = {f"{kind}_b{batch}": [side.rates[kind, batch] for side in (plain, proposing)] for kind, batch in cases}
    publish(
        "speculation", rows, REPETITIONS, code=CODE, proposed_tokens=PROPOSED, without_and_with_tokens_per_second=named
    )


def kinds_of(folder: Path) -> dict[str, Callable[[int], Request]]:
    """Return for each kind that has its data a function that makes its request of a number."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    edits = [_edit(tokenizer, text) for text in paragraphs(tokenizer)]
    eos = frozenset([2])

    def editing(number: int) -> Request:
        return Request("", edits[number % len(edits)], GREEDY, Stopping(NEW_TOKENS, eos))

    kinds: dict[str, Callable[[int], Request]] = {"editing": editing}
    path = Path(os.environ.get(DATA_VARIABLE, "")) / "newstest2014_en.txt"
    if not path.is_file():
        print(f"ordinary and greedy are skipped: {DATA_VARIABLE} names no folder with newstest2014_en.txt")
        return kinds
    ids = tokenizer.encode(path.read_text()[:60_000]).ids
    articles = [tuple(ids[start : start + 64]) for start in range(0, 64 * 64, 64)]
    kinds["ordinary"] = lambda number: Request(
        "", articles[number], Sampling(0.8, top_k=50, seed=number), Stopping(NEW_TOKENS)
    )
    kinds["greedy"] = lambda number: Request("", articles[number], GREEDY, Stopping(NEW_TOKENS))
    return kinds


def paragraphs(tokenizer: Any) -> list[str]:
    """Return paragraphs of docs/ that are prose of some length."""
    found = []
    for name in ("concepts", "architecture", "tuning", "security", "upgrade", "performance", "parallel"):
        for text in (ROOT / "docs" / f"{name}.md").read_text().split("\n\n"):
            prose = text[:1].isalpha() and "|" not in text and "```" not in text
            if prose and len(tokenizer.encode(text).ids) in _PARAGRAPH:
                found.append(" ".join(text.split()))
    return found


def _edit(tokenizer: Any, text: str) -> tuple[int, ...]:
    asked = f"Repeat this text word by word:\n\n{text}"
    chat = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    return tuple(tokenizer.encode(chat).ids)


def _measure(side: Side, kind: str, batch: int, request: Callable[[int], Request]) -> float:
    """Return the tokens per second of all rounds, from the first token of all requests of a round on."""
    tokens, seconds = 0, 0.0
    for turn in range(ROUNDS[batch]):
        numbers = range(turn * batch, (turn + 1) * batch)
        salt = b"%d" % side.scheduler.totals.steps  # nothing is cached: the other engine has overwritten the blocks
        found = [replace(request(number), request_id=f"{kind} {batch} {number}", salt=salt) for number in numbers]
        decoded, took = _decode(side, found)
        tokens, seconds = tokens + decoded, seconds + took
    return tokens / seconds


def _decode(side: Side, requests: list[Request]) -> tuple[int, float]:
    for one in requests:
        side.answers[one.request_id] = []
        side.scheduler.requests.submit(one)
        side.requests[one.request_id] = one
    while not all(side.answers[one.request_id] for one in requests):
        _turn(side)
    before, begun = side.scheduler.totals.generated_tokens, perf_counter()
    while not side.scheduler.empty:
        _turn(side)
    return side.scheduler.totals.generated_tokens - before, perf_counter() - begun


def _turn(side: Side) -> None:
    for output in side.engine.turn().outputs:
        if isinstance(output, Tokens):
            side.answers[output.request_id] += output.token_ids
    assert side.engine.last_failure is None


def _counted(side: Side) -> tuple[int, int]:
    return side.scheduler.totals.draft_tokens, side.scheduler.totals.accepted_tokens


def _difference(after: tuple[int, int], before: tuple[int, int]) -> tuple[int, int]:
    return after[0] - before[0], after[1] - before[1]


def rows_of(
    case: tuple[str, int], rates: Mapping[str, Sequence[float]], share: tuple[int, int], terms: Terms
) -> list[Row]:
    """Return the rows of a kind and batch from the rates of `plain`, `again` and `proposing`, all of one model."""
    name, (drafted, accepted) = f"{case[0]}_b{case[1]}", share
    own = {"proposing": replace(terms, work=name)}
    both, null = own | {"plain": replace(terms, work=name)}, null_interval(rates["again"], rates["plain"])
    ratio = round(median(one / other for one, other in zip(rates["proposing"], rates["plain"], strict=True)), 3)
    accepting = round(accepted / drafted, 3) if drafted else None
    return [
        row("speculation", f"{name}_over_without", ratio, "ratio", "no proposals", terms=both, null=null),
        row("speculation", f"{name}_tokens_per_second", round(median(rates["proposing"]), 1), "1/s", terms=own),
        row("speculation", f"{name}_proposed_tokens", drafted, "tokens of a repetition", terms=own),
        row("speculation", f"{name}_accepted_share", accepting, "ratio", terms=own),
    ]


def _compared(plain: Side, proposing: Side, terms: Terms) -> list[Row]:
    """Compare the answers of the last repetition, up to the first difference of each."""
    gaps = [
        _gap(plain, name, place, (answer[place], other[place]))
        for name, answer in plain.answers.items()
        if (place := _first_difference(answer, other := proposing.answers[name])) is not None
    ]
    near = sum(gap <= NEAR_TIE for gap in gaps)
    both = {"plain": terms, "proposing": terms}
    found = {
        "answers": (len(plain.answers), "answers"),
        "answers_that_differ_at_a_near_tie": (near, "answers"),
        "answers_that_differ_elsewhere": (len(gaps) - near, "answers"),
        "largest_gap_of_scores": (round(max(gaps, default=0.0), 3), "nats"),
    }
    return [row("speculation", metric, value, unit, terms=both) for metric, (value, unit) in found.items()]


def _first_difference(one: list[int], other: list[int]) -> int | None:
    return next((place for place, pair in enumerate(zip(one, other, strict=False)) if len({*pair}) == 2), None)


def _gap(side: Side, name: str, place: int, tokens: tuple[int, int]) -> float:
    """Return the difference of the scores of two tokens: log-probability by temperature, and noise."""
    request = side.requests[name]
    known = (*request.prompt, *side.answers[name][:place])
    first, second = (_logprob(side, known, token) for token in tokens)
    if request.sampling.greedy:
        return abs(first - second)
    draw = Draw(request.sampling, 0, len(known))
    noise = gumbel_noise([draw], side.scheduler.capacity.vocabulary_size, torch.device("cpu"))[0]
    first, second = (
        one / request.sampling.temperature + float(noise[token])
        for one, token in zip((first, second), tokens, strict=True)
    )
    return abs(first - second)


def _logprob(side: Side, known: tuple[int, ...], token: int) -> float:
    """Return the log-probability of a token after others."""
    again = Request("again", (*known, token), GREEDY, Stopping(1), prompt_logprobs=0, salt=b"again")
    side.scheduler.requests.submit(again)
    logprob = 0.0
    while not side.scheduler.empty:
        for output in side.engine.turn().outputs:
            if isinstance(output, Scored):
                logprob = output.tokens[-1].logprob or 0.0
    return logprob


if __name__ == "__main__":
    main()
