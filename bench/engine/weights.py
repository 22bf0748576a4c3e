"""Weights in bfloat16, 8 bits and 4 bits: speed beside peers, quality beside float32, and memory.

All forms are of the demo model, whose file has 4 bits (Q4_1, the embedding Q8_0): `int4` is this file, packed; `int8`
has a scale for each output; `bf16` and `float32` are its dequantized values. Each is an engine process of its own,
stopped while another is measured. openvino-genai runs if QUIRE_OPENVINO_PYTHON names an interpreter, with the folders
OPENVINO_MODEL (bfloat16), OPENVINO_MODEL_INT8 and OPENVINO_MODEL_INT4; llama.cpp if QUIRE_LLAMACPP_PYTHON does, with
the demo model's file or LLAMACPP_MODEL. Quality needs wikitext2_valid.txt in the folder QUIRE_DATA.

Ends within 12 minutes on a machine of half the speed of two cores of AMD EPYC: fewer repetitions if they take longer.
"""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.engine.cpu import TOKEN_BUDGET, Work, work_of
from bench.engine.perplexity import windows_of
from bench.loads.ceiling import MachineLimits, ModelCosts, ModelSizes, PackedBytes, measurement
from bench.loads.memory import DataMissing
from bench.loads.peer import PEERS, Peer
from bench.report.results import Row, publish, row
from bench.weights import memory, quality, speed
from bench.weights.forms import FORMS, FormWorkers
from engine.native.formats.gguf_file import gguf_of
from services.engine.startup.native_kernels import load_kernels
from services.models.model_store import default_cache, resolve

OPENVINO_MODELS = {
    "openvino_bf16": "OPENVINO_MODEL",
    "openvino_int8": "OPENVINO_MODEL_INT8",
    "openvino_int4": "OPENVINO_MODEL_INT4",
}


def main() -> None:
    """Measure quality, speed and memory, and publish them."""
    folder = resolve("demo", default_cache(), lambda *_: None)
    gguf = gguf_of(folder)
    assert gguf is not None, "the demo model's file"
    os.environ.setdefault("LLAMACPP_MODEL", str(gguf))
    sizes = ModelSizes.of(folder)
    works = {name: work_of(sizes.vocabulary, *lengths) for name, lengths in speed.WORKLOADS.items()}
    with FormWorkers(works) as workers:
        rows, more = _quality(folder, workers)
        workers.keep(speed.COMPARED)
        speed_rows, seconds, limits = _speed(workers, works, _costs(sizes, gguf))
    used = memory.measured(folder, ModelCosts.of(sizes))
    rows = [*speed_rows, *rows, *memory.rows_of(used)]
    repetitions = len(seconds["b1"]["bf16"])
    publish("weights", rows, repetitions, seconds=seconds, limits=limits, memory=used, quality=more)


def _costs(sizes: ModelSizes, gguf: Path) -> dict[str, ModelCosts]:
    """Return what each form of weights reads and multiplies. The scales of 8 bits are not counted."""
    plain = ModelCosts.of(sizes)
    return {
        "bf16": plain,
        "int8": plain._replace(packed=plain.elements),
        "int4": plain._replace(packed=PackedBytes.of(gguf)),
    }


def _speed(
    workers: FormWorkers, works: Mapping[str, Work], costs: Mapping[str, ModelCosts]
) -> tuple[list[Row], speed.Seconds, list[MachineLimits]]:
    measure, limits = measurement(load_kernels(str(default_cache().parent / "kernels"))), list[MachineLimits]()

    def measured() -> MachineLimits:
        limits.append(measure())
        return limits[-1]

    with ExitStack() as stack:
        peers = {
            name: stack.enter_context(
                Peer(PEERS / "openvino_tokens.py", "QUIRE_OPENVINO_PYTHON", works, label=name, model=model)
            )
            for name, model in OPENVINO_MODELS.items()
        }
        llamacpp = Peer(PEERS / "llamacpp_tokens.py", "QUIRE_LLAMACPP_PYTHON", works, model="LLAMACPP_MODEL")
        peers[llamacpp.label] = stack.enter_context(llamacpp)
        programs = {form: workers.program(form) for form in speed.COMPARED}
        programs |= {name: speed.program_of(peer) for name, peer in peers.items()}
        seconds = speed.repetitions(programs, speed.least_seconds(costs, TOKEN_BUDGET, measured))
    names = {label: peer.name or peer.missing for label, peer in peers.items()}
    return speed.rows_of(seconds, names), seconds, limits


def _quality(folder: Path, workers: FormWorkers) -> tuple[list[Row], dict[str, Any]]:
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
        rows += quality.rows_of(form, answers, reference)
    logprobs, llamacpp = quality.llamacpp_logprobs(windows)
    rows += quality.comparisons({form: one["windows"] for form, one in found.items()}, logprobs, llamacpp)
    return rows, {"forms": found, "llamacpp_windows": logprobs, "tokens": reference.tokens}


if __name__ == "__main__":
    main()
