"""Requests of simulations: lengths from files, and Poisson arrivals, as in section 6.1 of the PagedAttention paper."""

import csv
import os
import random
from collections.abc import Callable, Iterable, Mapping
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


# Workloads whose requests are the turns of conversations, with the probability that a request begins a new one: of the
# paper's artifact for vLLM, and for Orca.
NEW_CONVERSATIONS = {"chat_turns_half_new": 0.5, "chat_turns_tenth_new": 0.1}
_TURN_TOKENS = 1016  # of an answer at most, in the artifact: 8 less than half of the context


class InvalidTrace(ValueError):
    """A file that is no trace; the message names file, line and fault."""


# The files of the workloads.
FILES = {
    "sharegpt": "sharegpt_opt_lengths.csv",
    "alpaca": "alpaca_lengths.csv",
    **dict.fromkeys(("chat", "chat_of_1024", *NEW_CONVERSATIONS), "sharegpt_8k_lengths.csv"),
    "translation": "newstest2014_en.txt",
}


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


def turns(new: float, rate: float, seconds: float, seed: int = 0) -> list[Arrival]:
    """Return turns of conversations that arrive at `rate` a second, as in the paper's artifact. Raises InvalidTrace.

    The conversations are the first of the file that have as many turns as requests arrive. A request is the first turn
    of a new one with probability `new`, or if no other is live; else the next turn of any that is live.
    """
    arrivals = poisson([Lengths(1, 1)], rate, seconds, seed)
    draw = random.Random(seed)
    fresh, live = _conversations(len(arrivals)), list[list[Lengths]]()
    draw.shuffle(fresh)
    found = []
    for arrival in arrivals:
        if fresh and (not live or draw.random() < new):
            live.append(fresh.pop())
        chosen = draw.randrange(len(live))
        found.append(Arrival(arrival.seconds, live[chosen].pop(0)))
        if not live[chosen]:
            live.pop(chosen)
    return found


def _conversations(count: int) -> list[list[Lengths]]:
    """Return the first conversations of the chat file that have `count` turns. Raises InvalidTrace.

    A line of the file is a turn: its prompt is the whole history. It continues the line before if it has its tokens and
    more. Histories are cut to their last 1,024 tokens.
    """
    rows = read_lengths(_data(FILES["chat"]), "num_prefill_tokens", "num_decode_tokens")
    if len(rows) < count:
        raise InvalidTrace(f"{FILES['chat']} has {len(rows)} turns, but {count} requests arrive")
    found: list[list[Lengths]] = []
    history = 0
    for row in rows[:count]:
        if not found or row.prompt <= history:
            found.append([])
        found[-1].append(Lengths(min(row.prompt, CHAT_TOKENS), min(row.output, _TURN_TOKENS)))
        history = sum(row)
    return found


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


def missing(names: Iterable[str]) -> list[str]:
    """Return the files of these that are not in the folder of the data. Raises DataMissing without a folder."""
    return [name for name in sorted(set(names)) if not _data(name).is_file()]


def _data(name: str) -> Path:
    folder = os.environ.get(DATA_VARIABLE, "")
    if not folder:
        raise DataMissing(f"{DATA_VARIABLE} names no folder with {name}")
    return Path(folder) / name


def _sharegpt() -> list[Lengths]:
    """The paper's own lengths: pairs of at most 2,048 tokens, with the paper's means 161.31 and 337.99."""
    return within(read_lengths(_data(FILES["sharegpt"]), "prompt_tokens", "output_tokens"), CONTEXT_TOKENS)


def _alpaca() -> list[Lengths]:
    """Instructions counted in SmolLM2's tokens, scaled to the paper's means."""
    found = read_lengths(_data(FILES["alpaca"]), "prompt_tokens", "output_tokens")
    return within(scaled_to(found, *ALPACA_MEANS), CONTEXT_TOKENS)


def _chat() -> list[Lengths]:
    """Chat histories cut to their last 1,024 tokens, and answers of at most 1,024."""
    found = read_lengths(_data(FILES["chat"]), "num_prefill_tokens", "num_decode_tokens")
    return [Lengths(min(one.prompt, CHAT_TOKENS), min(one.output, CHAT_TOKENS)) for one in found]


def _translation() -> list[Lengths]:
    """News sentences and their translations, without the shared prefix."""
    path = _data(FILES["translation"])
    try:
        words = [len(line.split()) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidTrace(f"{path} cannot be read: {error}") from error
    sentences = [max(1, round(TOKENS_PER_WORD * count)) for count in words if count]
    lengths = [Lengths(one, max(1, round(ANSWER_OVER_SENTENCE * one))) for one in sentences]
    return within(lengths, CONTEXT_TOKENS)


def _long_chat() -> list[Lengths]:
    """Chats whose prompts all have 1,024 tokens, as those of most requests in the paper."""
    return [one._replace(prompt=CHAT_TOKENS) for one in _chat()]


_WORKLOADS: Mapping[str, Callable[[], list[Lengths]]] = {
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "chat": _chat,
    "chat_of_1024": _long_chat,
    "translation": _translation,
}
