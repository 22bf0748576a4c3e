"""Requests of simulations: lengths from files, and Poisson arrivals, as in section 6.1 of the PagedAttention paper."""

import csv
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from bench.loads.memory import DATA_VARIABLE, DataMissing, Lengths, scaled_to

CONTEXT_TOKENS = 2048  # of OPT
MOST_REQUESTS = 100_000  # of one run, which take hours
CHAT_TOKENS = 1024  # of a chat's prompt, and of its answer, at most
ALPACA_MEANS = (19.31, 58.45)  # tokens of prompts and outputs in the paper
# Prompts of the translation: a prefix of examples, and a sentence. No file has the answers: a German sentence is taken
# to have this many times the tokens of the English one.
ANSWER_OVER_SENTENCE = 1.5
TOKENS_PER_WORD = 1.35  # of English news, with vocabularies of some 32,000 to 50,000 entries


class InvalidTrace(ValueError):
    """A file that is no trace; the message names file, line and fault."""


class Arrival(NamedTuple):
    """One request: when it arrives, in seconds, and its lengths."""

    seconds: float
    lengths: Lengths


def load(name: str) -> list[Lengths]:
    """Return the lengths of a workload, in the order of its file. Raises InvalidTrace and DataMissing."""
    if name not in _WORKLOADS:
        raise InvalidTrace(f"no workload {name!r}: there are {', '.join(_WORKLOADS)}")
    return _WORKLOADS[name]()


def poisson(lengths: list[Lengths], rate: float, seconds: float, seed: int = 0) -> list[Arrival]:
    """Return requests that arrive at `rate` a second, with lengths drawn from a list. Raises InvalidTrace."""
    if not lengths:
        raise InvalidTrace("the trace has no requests")
    if not (0 < rate < float("inf") and 0 < seconds < float("inf")):
        raise InvalidTrace(f"rate and seconds must be finite and above 0, not {rate} and {seconds}")
    if rate * seconds > MOST_REQUESTS:
        raise InvalidTrace(f"rate times seconds must be at most {MOST_REQUESTS} requests, not {rate * seconds:g}")
    draw = random.Random(seed)
    arrivals: list[Arrival] = []
    now = draw.expovariate(rate)
    while now < seconds:
        arrivals.append(Arrival(now, draw.choice(lengths)))
        now += draw.expovariate(rate)
    return arrivals


def read_lengths(path: Path, prompt_column: str, output_column: str) -> list[Lengths]:
    """Read a CSV file of lengths; rows with an empty prompt or output are left out. Raises InvalidTrace."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            columns = rows.fieldnames or []
            if missing := [one for one in (prompt_column, output_column) if one not in columns]:
                raise InvalidTrace(f"{path} has no column {missing[0]!r}: it has {', '.join(columns) or 'none'}")
            found = [_lengths(path, line, row[prompt_column], row[output_column]) for line, row in enumerate(rows, 2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidTrace(f"{path} cannot be read: {error}") from error
    return [one for one in found if min(one) > 0]


def within(lengths: list[Lengths], tokens: int) -> list[Lengths]:
    """Return the lengths whose sum is at most `tokens`."""
    return [one for one in lengths if sum(one) <= tokens]


def _lengths(path: Path, line: int, prompt: str, output: str) -> Lengths:
    texts = [text.strip() if text else "" for text in (prompt, output)]
    if not all(text.isascii() and text.isdigit() for text in texts):
        raise InvalidTrace(
            f"{path}, line {line}: lengths must be integers of at least 0, not {prompt!r} and {output!r}"
        )
    return Lengths(*map(int, texts))


def _data(name: str) -> Path:
    folder = os.environ.get(DATA_VARIABLE, "")
    if not folder:
        raise DataMissing(f"{DATA_VARIABLE} names no folder with {name}")
    return Path(folder) / name


def _sharegpt() -> list[Lengths]:
    """The paper's own lengths: pairs of at most 2,048 tokens, with the paper's means 161.31 and 337.99."""
    return within(read_lengths(_data("sharegpt_opt_lengths.csv"), "prompt_tokens", "output_tokens"), CONTEXT_TOKENS)


def _alpaca() -> list[Lengths]:
    """Instructions counted in SmolLM2's tokens, scaled to the paper's means."""
    found = read_lengths(_data("alpaca_lengths.csv"), "prompt_tokens", "output_tokens")
    return within(scaled_to(found, *ALPACA_MEANS), CONTEXT_TOKENS)


def _chat() -> list[Lengths]:
    """Chat histories cut to their last 1,024 tokens, and answers of at most 1,024."""
    found = read_lengths(_data("sharegpt_8k_lengths.csv"), "num_prefill_tokens", "num_decode_tokens")
    return [Lengths(min(one.prompt, CHAT_TOKENS), min(one.output, CHAT_TOKENS)) for one in found]


def _translation() -> list[Lengths]:
    """News sentences and their translations, without the shared prefix."""
    path = _data("newstest2014_en.txt")
    try:
        words = [len(line.split()) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidTrace(f"{path} cannot be read: {error}") from error
    sentences = [max(1, round(TOKENS_PER_WORD * count)) for count in words if count]
    lengths = [Lengths(one, max(1, round(ANSWER_OVER_SENTENCE * one))) for one in sentences]
    return within(lengths, CONTEXT_TOKENS)


_WORKLOADS: Mapping[str, Callable[[], list[Lengths]]] = {
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "chat": _chat,
    "translation": _translation,
}
