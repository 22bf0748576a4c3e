"""Differential of dialects: 300 outputs of models, as Quire's parser and vLLM's read them, each whole.

vLLM's parsers run if QUIRE_VLLM_PYTHON names a Python interpreter that has it; that of Cohere's models needs
cohere-melody there. Both sides get the same text and tools, and a text has a parser of thoughts if it has a thought.
What they find is compared as a message: thought, content without whitespace at its ends, names and arguments of calls.
Each difference needs an explanation of bench/dialects/explanations.py.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bench.dialects.explanation import Explanation
from bench.dialects.explanations import BY_NAME, EXPLANATIONS
from bench.dialects.page import EQUAL, EXPLAINED, UNEXPLAINED, WORSE
from bench.dialects.readings import differing, read_by_peer, read_by_quire
from bench.dialects.shapes import Comparison
from bench.dialects.texts import SCHEMAS, DialectText, samples
from bench.loads.peer import PEERS, Peer
from bench.report.results import Row, publish, row

CODE = ("services/gateway/dialects", "services/gateway/http/openai", "bench/dialects", "bench/peers/vllm_dialects.py")


def main() -> None:
    """Read all texts, and publish in how many both differ."""
    texts = samples()
    with Peer(PEERS / "vllm_dialects.py", "QUIRE_VLLM_PYTHON", workload(texts)) as vllm:
        found = (vllm.measure("all") or {}).get("texts")
        peer = vllm.name or vllm.missing
    cases = [] if found is None else compared(texts, found)
    lines = [line for case in cases if (line := difference(case))]
    publish("dialects", rows(len(texts), None if found is None else lines, peer), 1, code=CODE, differences=lines)
    for line in lines:
        if not line["explanations"]:
            print(f"without an explanation: {line}")


def workload(texts: Sequence[DialectText]) -> dict[str, Any]:
    """Return what the peer gets."""
    tools = [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in SCHEMAS.items()]
    return {"tools": tools, "texts": [_sent(sample) for sample in texts]}


def _sent(sample: DialectText) -> dict[str, Any]:
    profile = sample.profile
    names = {"calls": profile.vllm_calls, "thoughts": profile.thoughts if sample.thinks else None}
    return names | {"text": sample.text, "marks": profile.marks, "tokens": profile.tokens}


def compared(texts: Sequence[DialectText], found: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Return each text with both readings."""
    pairs = zip(texts, found, strict=True)
    return [Comparison(sample, read_by_quire(sample), read_by_peer(theirs)) for sample, theirs in pairs]


def difference(case: Comparison) -> dict[str, Any] | None:
    """Return in what the readings differ and which explanations cover that, None if they are equal."""
    aspects = differing(case.ours, case.theirs)
    if not aspects:
        return None
    names = [one.name for one in explained(case) or ()]
    readings = {"quire": case.ours._asdict(), "vllm": case.theirs._asdict()}
    return {"text": case.sample.name, "aspects": aspects, "explanations": names, **({} if names else readings)}


def explained(case: Comparison) -> list[Explanation] | None:
    """Return what explains a difference: nothing for equal readings, None if an aspect has no explanation."""
    found = differing(case.ours, case.theirs)
    covering = [one for one in EXPLANATIONS if one.covers(case, found)]
    covered = {aspect for one in covering for aspect in one.aspects}
    return covering if covered == set(found) else None


def rows(texts: int, lines: Sequence[Mapping[str, Any]] | None, peer: str) -> list[Row]:
    """Return how many texts are read alike, and how many otherwise; without the peer, nothing but their number."""
    made = [row("dialects", "texts", texts, "1", exact=True)]
    counts = None if lines is None else _counts(texts, lines)
    for metric in (EQUAL, EXPLAINED, WORSE, UNEXPLAINED):
        made.append(row("dialects", metric, None if counts is None else counts[metric], "1", peer, exact=True))
    return made


def _counts(texts: int, lines: Sequence[Mapping[str, Any]]) -> Counter[str]:
    counts = Counter({EQUAL: texts - len(lines)})
    for line in lines:
        counts[EXPLAINED if line["explanations"] else UNEXPLAINED] += 1
        counts[WORSE] += any(BY_NAME[name].worse for name in line["explanations"])
    return counts


if __name__ == "__main__":
    main()
