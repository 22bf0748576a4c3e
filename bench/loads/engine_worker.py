"""An engine process with the KV manager's core and without a network, for `bench system` and `bench batch`.

`python -m bench.loads.engine_worker DEVICE_BLOCKS SETTINGS` has more settings of its engine as JSON. It prints its name
and terms as JSON. For each line of work it prints the seconds from the first request to the end of the last answer, and
its CPU seconds.
"""

import os

# As in the engine's process, and before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from bench.report.terms import Terms
from engine.model.loaded import dtype_name
from engine.run.loop import Engine
from engine.schedule.limits import Limits
from engine.schedule.outputs import Output, Scored, Tokens
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import EngineParts, assemble
from services.models.model_store import default_cache, resolve
from tests.in_process import InProcessBlocks

Item = dict[str, Any]

# Both sides of a comparison of the engine with itself: the demo model's weights in bfloat16, not as its file has them.
BFLOAT16 = {"dtype": "bfloat16", "weights": "bf16"}
_BITS = re.compile(r"\bQ(\d)_|\bint(\d)\b|\bw(\d)a16\b")
_FORMATS = re.compile(r"runs in (\S+) with weights in (.+?) and a KV cache in (\w+)")
GREEDY = Sampling(temperature=0.0)


def demo_parts(device_blocks: int, **settings: Any) -> EngineParts:
    """Return an engine of the demo model, or of `model`, as in `quire serve`, with default settings but for these."""
    folder = resolve(settings.pop("model", "demo"), default_cache(), lambda *_: None)
    kernels_folder = default_cache().parent / "kernels"
    return assemble(
        EngineSettings(model=str(folder), device_blocks=device_blocks, kernels_folder=str(kernels_folder), **settings)
    )


def terms_of(parts: EngineParts, work: str, *, processes: int = 1) -> Terms:
    """Return the terms of an assembled engine that serves this workload with its threads."""
    loaded = parts.loaded
    return model_terms(
        *(dtype_name(loaded.dtype), loaded.weight_format, dtype_name(loaded.cache_dtype)),
        work=work,
        threads=torch.get_num_threads(),
        processes=processes,
    )


def formats_logged(log: str) -> tuple[str, str, str]:
    """Return type, format of weights, and type of the KV cache that an engine has logged of itself."""
    found = _FORMATS.search(log)
    assert found, f"the engine did not log its formats:\n{log}"
    return found[1], found[2], found[3]


def model_terms(
    dtype: str, weights: str, kv_cache: str, *, work: str, threads: int, processes: int, start: str = "warm"
) -> Terms:
    """Return terms from the formats that an engine states. Rows that multiply quantized weights have 8 bits."""
    return Terms(
        weights=_short(weights),
        activations=dtype if weights == dtype else "int8",
        kv_cache=kv_cache,
        threads=threads,
        processes=processes,
        work=work,
        start=start,
    )


def _short(weights: str) -> str:
    """Return the numbers of a format of weights: int4 for Q4_1, `gptq int4 g64` and `w4a16`, `mxfp4` for these."""
    if found := _BITS.search(weights):
        return f"int{next(bits for bits in found.groups() if bits)}"
    return weights.removeprefix("compressed-tensors ")


def run(parts: EngineParts, work: list[Item]) -> dict[str, float]:
    """Run all requests at once, in an engine with an empty cache."""
    scheduler = Scheduler(parts.scheduler.capacity, parts.scheduler.limits)
    engine = Engine(scheduler, parts.runner, InProcessBlocks(scheduler.capacity), time.monotonic)
    begun, used = time.perf_counter(), time.process_time()
    for number, item in enumerate(work):
        prompt = tuple(item["prompt"])
        scheduler.requests.submit(Request(f"r{number}", prompt, GREEDY, Stopping(item["tokens"])))
    while not scheduler.empty:
        engine.turn()
        assert engine.last_failure is None
    assert scheduler.totals.generated_tokens == sum(item["tokens"] for item in work)
    return {"seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - used}


def prompt_logprobs(parts: EngineParts, tokens: Sequence[int], limits: Limits) -> list[float]:
    """Return the log-probabilities of a text's tokens but the first. Raises the engine's failure."""
    request = Request("scored", tuple(tokens), GREEDY, Stopping(1), prompt_logprobs=0)
    outputs = _outputs(parts, [request], limits)
    return [one.logprob or 0.0 for output in outputs if isinstance(output, Scored) for one in output.tokens]


def greedy(parts: EngineParts, prompts: Sequence[Sequence[int]], tokens: int, limits: Limits) -> list[list[int]]:
    """Return the new tokens of each prompt, in one batch. Raises the engine's failure."""
    found: dict[str, list[int]] = {f"r{number}": [] for number in range(len(prompts))}
    requests = [
        Request(name, tuple(prompt), GREEDY, Stopping(tokens)) for name, prompt in zip(found, prompts, strict=True)
    ]
    for output in _outputs(parts, requests, limits):
        if isinstance(output, Tokens):
            found[output.request_id] += output.token_ids
    return list(found.values())


def _outputs(parts: EngineParts, requests: Sequence[Request], limits: Limits) -> Iterator[Output]:
    """Run requests to their ends in an engine with an empty cache."""
    scheduler = Scheduler(parts.scheduler.capacity, limits)
    engine = Engine(scheduler, parts.runner, InProcessBlocks(scheduler.capacity), time.monotonic)
    for request in requests:
        scheduler.requests.submit(request)
    while not scheduler.empty:
        yield from engine.turn().outputs
        if engine.last_failure is not None:
            raise engine.last_failure


def main() -> None:
    """Answer each line of work."""
    settings = json.loads(sys.argv[2]) if sys.argv[2:] else {}
    parts = demo_parts(int(sys.argv[1]), **settings)
    print(json.dumps({"name": "engine in process", "terms": asdict(terms_of(parts, ""))}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(parts, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
