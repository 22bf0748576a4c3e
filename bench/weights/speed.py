"""Seconds of workloads with each form of weights, in alternation with peers, within a budget of time."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter

from bench.engine.cpu import CEILING_GOAL, PEER_GOAL, speed_ratio
from bench.engine.cpu import WORKLOADS as CPU_WORKLOADS
from bench.loads.ceiling import MachineLimits, ModelCosts
from bench.loads.peer import Peer
from bench.report.results import Row, row

WORKLOADS = {name: CPU_WORKLOADS[name] for name in ("b1", "b8", "b32", "b32_short", "ragged", "first_token_1024")}
WARM_UP = ("b8", "first_token_1024")
LEAST_REPETITIONS, MOST_REPETITIONS = 2, 5
BUDGET_SECONDS = 420.0
# The peers that a form of weights must exceed.
COMPARED = {"bf16": ("openvino_bf16",), "int8": ("openvino_int8",), "int4": ("openvino_int4", "llamacpp")}

# Seconds by workload and program, one for each repetition.
Seconds = dict[str, dict[str, list[float]]]
Program = Callable[[str], float | None]


def repetitions(programs: Mapping[str, Program], ceilings: Callable[[str], Mapping[str, float]]) -> Seconds:
    """Run all workloads with all programs in turns, as often as the budget allows.

    `ceilings` returns least seconds of a workload, by label; it is called in each repetition.
    """
    for name in WARM_UP:
        for program in programs.values():
            program(name)
    seconds: Seconds = {name: {} for name in WORKLOADS}
    begun, longest = perf_counter(), 0.0
    for repetition in range(MOST_REPETITIONS):
        turn = perf_counter()
        if repetition >= LEAST_REPETITIONS and turn - begun + longest > BUDGET_SECONDS:
            break
        for name, found in seconds.items():
            order = list(programs)[:: -1 if repetition % 2 else 1]
            spent = {label: programs[label](name) for label in order}
            for label, value in {**spent, **ceilings(name)}.items():
                if value is not None:
                    found.setdefault(label, []).append(value)
        longest = max(longest, perf_counter() - turn)
        print(f"repetition {repetition + 1}: {perf_counter() - turn:.0f} s", flush=True)
    return seconds


def program_of(peer: Peer) -> Program:
    """Return a function from a workload to a peer's seconds, None if it does not run."""

    def run(name: str) -> float | None:
        found = peer.measure(name)
        return None if found is None else found["seconds"]

    return run


def least_seconds(
    costs: Mapping[str, ModelCosts], token_budget: int, limits: Callable[[], MachineLimits]
) -> Callable[[str], dict[str, float]]:
    """Return a function from a workload to the least seconds of each form of weights, as `FORM_ceiling`."""

    def measure(name: str) -> dict[str, float]:
        now = limits()
        return {
            f"{form}_ceiling": one.least_seconds(*WORKLOADS[name], token_budget, now) for form, one in costs.items()
        }

    return measure


def rows_of(seconds: Seconds, peers: Mapping[str, str]) -> list[Row]:
    """Return the rows of all workloads: figures, ratios to bfloat16, to peers and to the ceiling, and goals.

    `peers` has the name of each, or why it did not run.
    """
    found = []
    for name, spent in seconds.items():
        found += [_figure(name, form, spent.get(form), None) for form in COMPARED]
        found += [_figure(name, label, spent.get(label), who) for label, who in peers.items()]
        for form, labels in COMPARED.items():
            found += _compared(name, form, spent, {label: peers[label] for label in labels})
    return found


def _compared(name: str, form: str, spent: Mapping[str, list[float]], peers: Mapping[str, str]) -> list[Row]:
    missing = [who for label, who in peers.items() if label not in spent]
    who = missing[0] if missing else " or ".join(peers.values())
    theirs = [] if missing else [min(times) for times in zip(*(spent[label] for label in peers), strict=True)]
    over_peer, of_ceiling = speed_ratio(theirs, spent[form]), speed_ratio(spent[f"{form}_ceiling"], spent[form])
    goal = None if over_peer is None or of_ceiling is None else max(over_peer / PEER_GOAL, of_ceiling / CEILING_GOAL)
    rows = [
        row("weights", f"{form}_{name}_over_the_better_peer", over_peer, "ratio", who),
        row("weights", f"{form}_{name}_of_the_ceiling", of_ceiling, "ratio", "memory and products of the machine"),
        row("weights", f"{form}_{name}_of_its_goal", goal and round(goal, 3), "ratio", who),
    ]
    if form != "bf16":
        over = speed_ratio(spent["bf16"], spent[form])
        rows.append(row("weights", f"{form}_{name}_over_bf16", over, "ratio", "bfloat16"))
    return rows


def _figure(name: str, label: str, seconds: Sequence[float] | None, who: str | None) -> Row:
    """Return the tokens per second of a program, or its time to the first token."""
    lengths, tokens = WORKLOADS[name]
    if name.startswith("first_token"):
        return row("weights", f"{label}_{name}_ms", round(median(seconds) * 1e3, 1) if seconds else None, "ms", who)
    rate = round(len(lengths) * tokens / median(seconds), 1) if seconds else None
    return row("weights", f"{label}_{name}_tokens_per_second", rate, "1/s", who)
