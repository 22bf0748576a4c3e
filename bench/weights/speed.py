"""Seconds of workloads with each form of weights, in turn with peers.

Peers run as their users run them: with their own best weights of 8 and 4 bits, or of 16 where they have no other on a
CPU, and their own choice of types for activations and KV cache.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bench.engine.cpu import WORKLOADS as CPU_WORKLOADS
from bench.engine.cpu import PeerSide, Program, figure, speed_ratio
from bench.loads.ceiling import MachineLimits, ModelCosts
from bench.report.results import Row, in_turn, repeated, row
from bench.report.terms import AS_USERS_RUN_IT, Terms
from bench.report.verdict import Interval, goal, null_interval

WORKLOADS = {name: CPU_WORKLOADS[name] for name in ("b1", "b8", "b32", "b32_short", "ragged", "first_token_1024")}
WARM_UP = ("b8", "first_token_1024")
REPETITIONS = 5
# A peer that takes so many times as long as the fastest one in a small batch cannot be the best in a large one.
SLOW, SMALL, LARGE = 2.0, "b8", ("b32", "b32_short", "ragged")
# The form that runs twice in each repetition, as `again`.
TWICE = "int4"
# A form's first tokens are compared with openvino-genai's in as many bits, too.
OF_AS_MANY_BITS = {"int8": "openvino_int8", "int4": "openvino_int4"}
# The peers that a form of weights must exceed.
COMPARED: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "int8": ("openvino_int8",),
    "int4": ("openvino_int4", "openvino_int8", "llamacpp", "vllm"),
}
_MACHINE = "memory and products of the machine"

# Least seconds by workload and label.
Ceilings = Mapping[str, Mapping[str, float]]


@dataclass
class Speeds:
    """Seconds and used cores by workload and program, one for each repetition, and how slow left out peers are."""

    seconds: dict[str, dict[str, list[float]]] = field(default_factory=lambda: {name: {} for name in WORKLOADS})
    cores: dict[str, dict[str, list[float | None]]] = field(default_factory=lambda: {name: {} for name in WORKLOADS})
    slow: dict[str, float] = field(default_factory=dict)


def measured(
    programs: Mapping[str, Program], peers: Sequence[str], ceilings: Callable[[], Ceilings], count: int = REPETITIONS
) -> Speeds:
    """Run all workloads with all programs in turn in each repetition, after some workloads that warm up.

    `ceilings` measures the machine; it is called in each repetition.
    """
    found, slow = Speeds(), {}
    for number in repeated(count, "weights"):
        if number == 0:
            slow = slow_ones(_warmed_up(programs), peers)
            found.slow = slow
            continue
        least = ceilings()
        for name in WORKLOADS:
            order = in_turn([one for one in programs if name not in LARGE or one not in slow], number)
            _record(found, name, {label: programs[label](name) for label in order}, least[name])
    return found


def _warmed_up(programs: Mapping[str, Program]) -> dict[str, float]:
    """Run the workloads that warm up; return the seconds of the small batch, which runs once more, by program."""
    for name in WARM_UP:
        for program in programs.values():
            program(name)
    again = {label: program(SMALL) for label, program in programs.items()}
    return {label: one[0] for label, one in again.items() if one}


def slow_ones(small: Mapping[str, float], peers: Sequence[str]) -> dict[str, float]:
    """Return the peers that are left out of large batches, and how many times as long they take as the fastest one."""
    seconds = {label: small[label] for label in peers if label in small}
    times = {label: one / min(seconds.values()) for label, one in seconds.items()}
    return {label: round(one, 1) for label, one in times.items() if one > SLOW}


def _record(
    found: Speeds, name: str, spent: Mapping[str, tuple[float, float | None] | None], least: Mapping[str, float]
) -> None:
    for label, one in spent.items():
        if one:
            found.seconds[name].setdefault(label, []).append(one[0])
            found.cores[name].setdefault(label, []).append(one[1])
    for label, seconds in least.items():
        found.seconds[name].setdefault(label, []).append(seconds)


def least_seconds(costs: Mapping[str, ModelCosts], token_budget: int, limits: Mapping[str, MachineLimits]) -> Ceilings:
    """Return the least seconds of each workload and form of weights, as `FORM_ceiling`; limits are by form."""
    return {
        name: {
            f"{form}_ceiling": one.least_seconds(*lengths, token_budget, limits[form]) for form, one in costs.items()
        }
        for name, lengths in WORKLOADS.items()
    }


def rows_of(speeds: Speeds, forms: Mapping[str, Terms], sides: Mapping[str, PeerSide]) -> list[Row]:
    """Return the rows of all workloads: figures, ratios to bfloat16, to peers and to the ceiling, and goals.

    `forms` has the terms of each form of weights. Raises UnequalTerms if a name hides how sides differ.
    """
    return [one for name in WORKLOADS if speeds.seconds[name] for one in _Workload(name, speeds, forms, sides).rows()]


class _Workload:
    """The rows of one workload."""

    def __init__(self, name: str, speeds: Speeds, forms: Mapping[str, Terms], sides: Mapping[str, PeerSide]) -> None:
        self._name, self._slow, self._sides = name, speeds.slow, sides
        self._spent = speeds.seconds[name]
        known = dict(forms) | {label: side.terms for label, side in sides.items() if side.terms}
        self._terms = {label: replace(terms, work=name) for label, terms in known.items()}
        self._null: Interval = null_interval(self._spent[TWICE], self._spent["again"])

    def rows(self) -> list[Row]:
        """Return all of them."""
        found = [self._figure(label, None) for label in COMPARED]
        found += [self._figure(label, self._who(label)) for label in self._sides]
        for form, labels in COMPARED.items():
            found += self._of_ours(form)
            found += self._over_peers(form, labels) if labels else []
        if self._name.startswith("first_token"):
            found += [self._over_openvino(form, label) for form, label in OF_AS_MANY_BITS.items()]
        return found

    def _figure(self, label: str, who: str | None) -> Row:
        ran = self._spent.get(label, [])
        return figure("weights", f"{label}_{self._name}", self._name, ran, who, self._of(label) if ran else {})

    def _who(self, label: str) -> str:
        """Return the name of a peer, or why it did not run this workload."""
        name = self._sides[label].name
        if label in self._spent or label not in self._slow:
            return name
        return f"{name}, not run: {self._slow[label]} times the seconds of the fastest peer with 8 requests"

    def _of(self, *labels: str) -> dict[str, Terms]:
        return {label: self._terms[label] for label in labels if label in self._terms}

    def _of_ours(self, form: str) -> list[Row]:
        """Return how much of the ceiling a form reaches, and its speed over bfloat16's."""
        own, name = self._spent[form], f"{form}_{self._name}"
        share, terms, null = speed_ratio(self._spent[f"{form}_ceiling"], own), self._of(form), self._null
        rows = [row("weights", f"{name}_of_the_ceiling", share, "ratio", _MACHINE, terms=terms, null=null, limit=True)]
        if form != "bf16":
            over, both = speed_ratio(self._spent["bf16"], own), self._of(form, "bf16")
            rows.append(row("weights", f"{name}_over_bf16", over, "ratio", "bfloat16", terms=both, null=self._null))
        return rows

    def _over_openvino(self, form: str, label: str) -> Row:
        """Return the speed over openvino-genai's own weights of as many bits; without a value if it did not run."""
        over, metric = speed_ratio(self._spent.get(label, []), self._spent[form]), f"{form}_{self._name}_over_openvino"
        name, terms = f"{metric}_{AS_USERS_RUN_IT}", self._of(form, label)
        return row("weights", name, over, "ratio", self._who(label), terms=terms, null=self._null)

    def _over_peers(self, form: str, labels: Sequence[str]) -> list[Row]:
        """Return the speed over the best peer's, and the goal; without values if a peer is missing."""
        missing = next((self._sides[label].name for label in labels if not self._sides[label].terms), None)
        ran = [label for label in labels if label in self._spent]
        best = [] if missing else [min(times) for times in zip(*(self._spent[one] for one in ran), strict=True)]
        over, own = speed_ratio(best, self._spent[form]), f"{form}_{self._name}"
        reached, by = goal(over, speed_ratio(self._spent[f"{form}_ceiling"], self._spent[form]))
        who, terms = missing or " or ".join(map(self._who, ran)), self._of(form, *ran)
        found = {f"{own}_over_the_best_peer": (over, None), f"{own}_of_its_goal": (reached, by)}
        return [
            row("weights", f"{metric}_{AS_USERS_RUN_IT}", value, "ratio", who, terms=terms, null=self._null, by=through)
            for metric, (value, through) in found.items()
        ]
