"""Sampling on a CPU: the kernels beside torch's operators, and the seconds of a row.

32 rows of logits with the vocabulary of the demo model, normally distributed, and the settings that clients send most.
The kernels, twice, and torch take turns. The floor reads each logit once.
"""

from collections.abc import Callable
from itertools import count
from statistics import median

import torch

from bench.engine.kernels import take_turns
from bench.report.results import publish, repeated, row
from bench.report.terms import Terms
from bench.report.verdict import null_interval
from engine.run.samplers import NativeSampler, Sampler, TorchSampler
from engine.run.sampling import Draw
from engine.schedule.request import Sampling
from services.engine.startup.native_kernels import load_kernels
from services.models.model_store import default_cache

REPETITIONS = 11
CODE = ("engine/run", "engine/native", "bench/engine/sampling.py", "bench/engine/kernels.py")
ROWS, VOCABULARY = 32, 49_152
SPREAD = 3.0  # standard deviation of the logits
SETTINGS = {
    "temperature": Sampling(temperature=1.0),
    "top_k": Sampling(temperature=0.8, top_k=50),
    "top_p": Sampling(temperature=0.8, top_p=0.95),
    "min_p": Sampling(temperature=1.0, min_p=0.05),
    "top_k_and_top_p": Sampling(temperature=0.8, top_k=50, top_p=0.9),
}


def main() -> None:
    """Measure all settings, and publish them."""
    kernels = load_kernels(str(default_cache().parent / "kernels"))
    logits = SPREAD * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1))
    threads = torch.get_num_threads()
    samplers: dict[str, Sampler] = {name: NativeSampler(kernels, threads) for name in ("native", "again")}
    samplers["torch"] = TorchSampler()
    ways: dict[str, Callable[[], object]] = {"floor": lambda: logits.amax(dim=-1)}
    for setting, sampling in SETTINGS.items():
        for name, sampler in samplers.items():
            ways[f"{setting} {name}"] = _way(sampler, sampling, logits)
    seconds = take_turns(ways, repeated(REPETITIONS, "sampling"))
    rows = [row("sampling", "floor_us", _microseconds(seconds["floor"]), "us a row")]
    for setting in SETTINGS:
        own, others = seconds[f"{setting} native"], seconds[f"{setting} torch"]
        ratio = round(median(other / one for one, other in zip(own, others, strict=True)), 1)
        terms, null = (
            Terms(activations="float32", threads=threads, work=setting),
            null_interval(own, seconds[f"{setting} again"]),
        )
        both = {"quire": terms, "torch": terms}
        rows.append(row("sampling", f"{setting}_us", _microseconds(own), "us a row", terms={"quire": terms}))
        rows.append(row("sampling", f"{setting}_over_torch", ratio, "ratio", "torch", terms=both, null=null))
    publish("sampling", rows, REPETITIONS, code=CODE, rows_of_a_step=ROWS, vocabulary=VOCABULARY, seconds=seconds)


def _way(sampler: Sampler, sampling: Sampling, logits: torch.Tensor) -> Callable[[], object]:
    """Return a function that samples all rows, with other noise at each call."""
    positions = count()
    return lambda: sampler.sample(logits, [Draw(sampling, 0, next(positions)) for _ in range(ROWS)])


def _microseconds(seconds: list[float]) -> float:
    return round(median(seconds) / ROWS * 1e6, 1)


if __name__ == "__main__":
    main()
