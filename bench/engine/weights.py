"""Weights in bfloat16, 8 bits and 4 bits: speed beside peers, quality beside float32, and memory.

All forms are of the demo model, whose file has 4 bits (Q4_1, the embedding Q8_0): `int4` is this file, packed; `int8`
has a scale for each output; `bf16` and `float32` are its dequantized values. Each is an engine process of its own,
stopped while another is measured. Peers are as their users run them, with the types that they choose; `bench cpu` has
them in bfloat16. openvino-genai runs if QUIRE_OPENVINO_PYTHON names an interpreter, with the folders
OPENVINO_MODEL_INT8 and OPENVINO_MODEL_INT4; vLLM, which has no such weights on CPUs, with QUIRE_VLLM_PYTHON and
VLLM_MODEL (bfloat16); llama.cpp with QUIRE_LLAMACPP_PYTHON, and the demo model's file or LLAMACPP_MODEL. Quality needs
wikitext2_valid.txt in the folder QUIRE_DATA.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.engine.cpu import TOKEN_BUDGET, Program, Work, program_of, side_of, work_of
from bench.engine.perplexity import windows_of
from bench.loads.ceiling import MachineLimits, ModelCosts, ModelSizes, PackedBytes, measurement
from bench.loads.memory import DataMissing
from bench.loads.peer import PEERS, Peer
from bench.report.results import Row, publish, row
from bench.report.terms import Terms
from bench.weights import memory, quality, speed
from bench.weights.forms import FORMS, FormWorkers
from engine.native.formats.gguf.file import gguf_of
from services.engine.startup.native_kernels import load_kernels
from services.models.model_store import default_cache, resolve

OPENVINO_MODELS = {"openvino_int8": "OPENVINO_MODEL_INT8", "openvino_int4": "OPENVINO_MODEL_INT4"}
CODE = ("blocks", "engine", "services/engine", "bench/engine/weights.py", "bench/weights", "bench/peers", "bench/loads")


def main() -> None:
    """Measure quality, speed and memory, and publish them."""
    folder = resolve("demo", default_cache(), lambda *_: None)
    gguf = gguf_of(folder)
    assert gguf is not None, "the demo model's file"
    os.environ.setdefault("LLAMACPP_MODEL", str(gguf))
    sizes = ModelSizes.of(folder)
    works = {name: work_of(sizes.vocabulary, *lengths) for name, lengths in speed.WORKLOADS.items()}
    with FormWorkers(works) as workers:
        terms = workers.terms()
        rows, more = _quality(folder, workers, terms)
        workers.keep(speed.COMPARED)
        speed_rows, measured = _speed(workers, works, _costs(sizes, gguf), terms)
    used = memory.measured(folder, ModelCosts.of(sizes))
    rows = [*speed_rows, *rows, *memory.rows_of(used, terms["int4"])]
    publish("weights", rows, speed.REPETITIONS, code=CODE, memory=used, quality=more, **measured)


def _costs(sizes: ModelSizes, gguf: Path) -> dict[str, ModelCosts]:
    """Return what each form of weights reads and multiplies. The scales of 8 bits are not counted."""
    plain = ModelCosts.of(sizes)
    return {
        "bf16": plain,
        "int8": plain._replace(packed=plain.elements),
        "int4": plain._replace(packed=PackedBytes.of(gguf)),
    }


def _speed(
    workers: FormWorkers, works: Mapping[str, Work], costs: Mapping[str, ModelCosts], terms: Mapping[str, Terms]
) -> tuple[list[Row], dict[str, Any]]:
    """Return the rows of speed, and what was measured."""
    limits: list[Mapping[str, MachineLimits]] = []
    kernels = load_kernels(str(default_cache().parent / "kernels"))
    measures = {form: measurement(kernels, one.matrices) for form, one in costs.items()}

    def ceilings() -> speed.Ceilings:
        limits.append({form: measure() for form, measure in measures.items()})
        return speed.least_seconds(costs, TOKEN_BUDGET, limits[-1])

    with ExitStack() as stack:
        peers = {one.label: stack.enter_context(one) for one in _peers(works)}
        programs: dict[str, Program] = {form: workers.program(form) for form in speed.COMPARED}
        programs["again"] = workers.program(speed.TWICE)
        programs |= {label: program_of(peer) for label, peer in peers.items()}
        measured = speed.measured(programs, list(peers), ceilings)
        sides = {label: side_of(peer, "") for label, peer in peers.items()}
    more = {"seconds": measured.seconds, "cores_used": measured.cores, "slow": measured.slow, "limits": limits}
    ours = {form: terms[form] for form in speed.COMPARED}
    return speed.rows_of(measured, ours, sides), more


def _peers(works: Mapping[str, Work]) -> Iterator[Peer]:
    """Yield the peers, each started when it is taken."""
    script, python = PEERS / "openvino_tokens.py", "QUIRE_OPENVINO_PYTHON"
    for label, model in OPENVINO_MODELS.items():
        yield Peer(script, python, works, label, model, arguments=("defaults",))
    yield Peer(PEERS / "llamacpp_tokens.py", "QUIRE_LLAMACPP_PYTHON", works, model="LLAMACPP_MODEL")
    yield Peer(PEERS / "vllm_tokens.py", "QUIRE_VLLM_PYTHON", works, model="VLLM_MODEL")


def _quality(folder: Path, workers: FormWorkers, terms: Mapping[str, Terms]) -> tuple[list[Row], dict[str, Any]]:
    """Return the rows of quality, and what each form answered; without the data, rows without values."""
    try:
        windows = windows_of(folder, quality.WINDOWS, quality.WINDOW_TOKENS)
    except DataMissing as missing:
        print(f"quality is not measured: {missing}", flush=True)
        return [row("weights", metric, None, "ratio", str(missing)) for metric in quality.COMPARISONS], {}
    reference = quality.reference_of(workers["float32"], windows)
    found = {form: quality.measured(workers[form], windows, reference) for form in FORMS}
    rows = []
    for form, answers in found.items():
        answers["differences"] = quality.differences_of(workers["float32"], reference, answers["tokens"])
        rows += quality.rows_of(form, answers, reference, terms)
    llamacpp = quality.llamacpp_logprobs(windows)
    rows += quality.comparisons({form: one["windows"] for form, one in found.items()}, llamacpp, terms)
    return rows, {"forms": found, "llamacpp_windows": llamacpp.logprobs, "tokens": reference.tokens}


if __name__ == "__main__":
    main()
