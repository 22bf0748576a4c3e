"""Decoding with a GPT-OSS-shaped tiny model: the fused decoder beside the model's modules, in bfloat16.

The model has random weights, 32 experts of which 4 compute each token, and windows in every second layer. Both decoders
have the same weights, attention kernels and threads, and take turns; the fused one runs twice. A step is that of
sequences with a context of CONTEXT tokens.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, GptOssConfig

from bench.engine.kernels import take_turns
from bench.report.results import Row, publish, repeated, row
from bench.report.terms import Terms
from bench.report.verdict import null_interval
from blocks import blocks_for
from engine.attention.backend import PagedBatch
from engine.attention.llama_shape import LlamaShape
from engine.model.decoder import Decoder, ModulesDecoder
from engine.model.loading import load_model
from engine.native.cpu_backend import CpuBackend
from engine.native.decoder import NativeDecoder
from engine.native.llama_weights import FileWeights
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work
from services.engine.startup.native_kernels import load_kernels
from services.models.model_store import default_cache

REPETITIONS = 11
CODE = ("engine/attention", "engine/native", "engine/model", "bench/engine/experts.py", "bench/engine/kernels.py")
SEQUENCES = (1, 8)
CONTEXT, BLOCK = 256, 16
CONFIG = GptOssConfig(
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    num_local_experts=32,
    num_experts_per_tok=4,
    max_position_embeddings=4096,
    initializer_range=0.1,
)


def main() -> None:
    """Measure steps of all numbers of sequences, and publish them."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        decoders = _decoders(Path(folder), threads)
        ways = {f"{name} {count}": _step(one, count) for name, one in decoders.items() for count in SEQUENCES}
        seconds = take_turns(ways, repeated(REPETITIONS, "experts"))
    rows = [one for count in SEQUENCES for one in rows_of(seconds, count, threads)]
    publish("experts", rows, REPETITIONS, code=CODE, seconds=seconds)


def rows_of(seconds: dict[str, list[float]], count: int, threads: int) -> list[Row]:
    """Return the milliseconds of a step of this many sequences, and how many times as long the modules take."""
    own, modules = seconds[f"fused {count}"], seconds[f"modules {count}"]
    terms = Terms(
        weights="bfloat16", activations="bfloat16", kv_cache="bfloat16", threads=threads, work=f"{count} sequences"
    )
    ratio = round(median(other / one for one, other in zip(own, modules, strict=True)), 2)
    null, both = null_interval(own, seconds[f"again {count}"]), {"fused": terms, "modules": terms}
    return [
        row("experts", f"decode_{count}_ms", round(median(own) * 1e3, 3), "ms", terms={"fused": terms}),
        row("experts", f"modules_decode_{count}_ms", round(median(modules) * 1e3, 3), "ms", terms={"modules": terms}),
        row("experts", f"decode_{count}_over_modules", ratio, "ratio", "modules", terms=both, null=null),
    ]


def _decoders(folder: Path, threads: int) -> dict[str, Decoder]:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).save_pretrained(folder)
    loaded = load_model(folder, torch.bfloat16, torch.device("cpu"))
    kernels = load_kernels(str(default_cache().parent / "kernels"))
    blocks = max(SEQUENCES) * blocks_for(CONTEXT, BLOCK)
    backend = CpuBackend(kernels, loaded.geometry, BLOCK, blocks, torch.bfloat16, threads=threads)
    shape, weights = LlamaShape.of(loaded.model), FileWeights(folder)
    fused = NativeDecoder(kernels, shape, weights, backend.layer_caches, CONTEXT, threads)
    return {"fused": fused, "again": fused, "modules": ModulesDecoder(loaded, backend)}


def _step(decoder: Decoder, count: int) -> Callable[[], object]:
    """Return a function that computes one token of each sequence."""
    each = blocks_for(CONTEXT, BLOCK)
    tables = [tuple(range(1 + number * each, 1 + (number + 1) * each)) for number in range(count)]
    work = [Work(number, (number,), CONTEXT - 1, table, True, Sampling()) for number, table in enumerate(tables)]
    batch = PagedBatch.of(work, BLOCK, torch.device("cpu"))
    tokens, positions = torch.arange(count), torch.full((count,), CONTEXT - 1)
    return lambda: decoder.logits(tokens, positions, torch.arange(count), batch)


if __name__ == "__main__":
    main()
