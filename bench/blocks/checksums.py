"""What checksums of blocks cost: their share of the CPU time of all processes, and how much longer a swap in takes.

The engine serves over gRPC, as in `bench kv_engine`; the demo model in bfloat16, and one of its size with windows in
five of six layers and random weights. A swap in is a copy of blocks of the demo model from the host tier, made by the
CPU's kernels, with checksums and without in turn.
"""

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.blocks.kv_engine import Work, over_grpc
from bench.loads.engine_worker import BFLOAT16, demo_parts, terms_of
from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.terms import Terms
from blocks import Copy
from engine.kept.kept_memory import KeptMemory
from engine.kept.seal_writer import SealWriter
from engine.proof.block_proof import BlockProof
from engine.schedule.step_plan import Copies
from services.engine.block_client import BlockClient
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import EngineParts, assemble
from services.models.model_store import default_cache

REPETITIONS = 5
BLOCKS = 1024
SWAPPED = 256
WORKS = {"prefill": Work(8, 1024, 1), "decode": Work(16, 24, 80)}
CODE = ("blocks", "engine", "kvmanager", "protos", "services", "bench/blocks/checksums.py", "bench/blocks/kv_engine.py")
_GIGA = 1e9
_WINDOW = 512
_VOCABULARY = 32_000


def main() -> None:
    """Measure, and publish the costs."""
    shares: dict[str, list[float]] = {}
    swaps: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        models = {
            "": demo_parts(BLOCKS, host_blocks=SWAPPED, keep_blocks="off", **BFLOAT16),
            "windows_": _windows(Path(folder)),
        }
        swap = _Swap(models[""])
        for number in repeated(REPETITIONS, "Checksums"):
            for prefix, parts in models.items():
                for name, work in WORKS.items():
                    share = share_of(parts, work)
                    if number:
                        shares.setdefault(f"{prefix}{name}_share", []).append(share)
            seconds = {arm: swap.seconds(checked=arm == "checked") for arm in in_turn(["checked", "unchecked"], number)}
            if number:
                swaps.append(seconds)
        rows = [_share_row(name, column, models) for name, column in shares.items()]
        rows += _swap_rows(swap, swaps, terms_of(models[""], f"{SWAPPED} blocks"))
    publish("checksums", rows, REPETITIONS, code=CODE, runs={"shares": shares, "swaps": swaps})


def share_of(parts: EngineParts, work: Work) -> float:
    """Serve the work; return the time inside checksums over the CPU time of all processes."""
    assert parts.proof is not None
    before = parts.proof.counts.seconds
    run = over_grpc(parts, BlockClient, work)
    computed = work.sequences * (work.prompt_tokens + work.max_tokens - 1)
    used = run["cpu_us_per_computed_token"] * computed / 1e6
    return (parts.proof.counts.seconds - before) / used


class _Swap:
    """Swaps blocks of the demo model in, in a scattered order."""

    def __init__(self, parts: EngineParts) -> None:
        assert parts.proof is not None
        backends: Any = parts.proof.backends
        caches = [(one.cache, one.host_cache) for one in backends]
        self.bytes = backends[0].cache[0].nbytes * SWAPPED
        self._proofs = {
            checked: BlockProof(
                backends, SealWriter(KeptMemory.private(caches), time.perf_counter if checked else None)
            )
            for checked in (False, True)
        }
        order = [1 + 97 * place % SWAPPED for place in range(SWAPPED)]  # 97 is no divisor: each once
        self._out = Copies(device_to_host=tuple(Copy(block, place) for place, block in enumerate(order, 1)))
        self._in = Copies(host_to_device=tuple(Copy(place, block) for place, block in enumerate(order, 1)))

    def seconds(self, *, checked: bool) -> float:
        """Return how long the blocks take to the device, after they were brought to the host."""
        proof = self._proofs[checked]
        proof.check([self._out], [])
        begun = time.perf_counter()
        wrong = proof.check([self._in], [])
        taken = time.perf_counter() - begun
        assert not wrong
        return taken


def _windows(folder: Path) -> EngineParts:
    """Return an engine of a random model of the demo model's size whose layers have windows, but each sixth."""
    import torch
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=_VOCABULARY,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=_WINDOW,
        max_position_embeddings=4096,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    settings: dict[str, Any] = {"kernels_folder": str(default_cache().parent / "kernels"), "keep_blocks": "off"}
    return assemble(EngineSettings(model=str(folder), device_blocks=BLOCKS, **settings | BFLOAT16))


def _share_row(name: str, column: list[float], models: dict[str, EngineParts]) -> Row:
    parts = models["windows_" if name.startswith("windows_") else ""]
    terms = terms_of(parts, name.removesuffix("_share"), processes=2)
    return row("checksums", name, round(median(column), 5), "share", "all CPU time", terms={"checksums": terms})


def _swap_rows(swap: _Swap, runs: list[dict[str, float]], terms: Terms) -> list[Row]:
    sides = {"checked": terms, "unchecked": terms}
    ratio = median(run["checked"] / run["unchecked"] for run in runs)
    speeds = {arm: swap.bytes / median(run[arm] for run in runs) / _GIGA for arm in sides}
    return [
        row("checksums", "swap_in_over_unchecked", round(ratio, 4), "ratio", "the same without checksums", terms=sides),
        *(
            row("checksums", f"swap_in_{arm}", round(speed, 2), "GB/s", terms={arm: terms})
            for arm, speed in speeds.items()
        ),
    ]


if __name__ == "__main__":
    main()
