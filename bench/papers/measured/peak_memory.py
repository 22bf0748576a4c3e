"""The peak memory of one sequence at several lengths, with its cache in blocks and with transformers' default cache.

Both compute the prompt in one step and then decode the last tokens of the sequence. Each measurement runs in a new
process. The model first runs on a short text; the memory resident after that is recorded as the model's.
"""

import random
import re
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

# First, because it sets how threads of torch wait.
from bench.loads.engine_worker import BFLOAT16, demo_parts, terms_of  # isort: skip
from bench.engine.context import decoded_at, engine_of
from bench.papers.case import Values
from blocks import blocks_for

BLOCK_SIZE = 16
MOST_DECODED = 256
_WARM = 20  # tokens of a first sequence, which loads what the model uses
_KIB = 1024


def paged_peak(length: int) -> Values:
    """Measure the CPU backend. The pool has as many blocks as the sequence holds, and one for padding.

    The pool counts as memory of the sequence: `model_bytes` is the resident memory without it.
    """
    blocks = blocks_for(length, BLOCK_SIZE)
    parts = demo_parts(blocks, device="cpu", attention_backend="cpu", token_budget=length, **BFLOAT16)
    text = _text(length)
    decoded_at(engine_of(parts), text[:_WARM])
    _wait_until_populated()
    block_bytes = parts.loaded.geometry.block_bytes(BLOCK_SIZE, parts.loaded.dtype)
    pool_bytes = (blocks + 1) * block_bytes
    model_bytes = _resident_bytes("VmRSS") - pool_bytes
    engine = engine_of(parts)
    seconds, peak_bytes = _peak_of(lambda: decoded_at(engine, text, decoded_of(length) + 1))
    sizes = {"model_bytes": model_bytes, "peak_bytes": peak_bytes, "kv_bytes": blocks * block_bytes}
    terms = asdict(terms_of(parts, "a sequence"))
    return {**sizes, "seconds": seconds, "device": parts.device, "terms": terms}


def default_peak(length: int, dtype: str) -> Values:
    """Measure transformers' default cache, which is allocated again for each token. `dtype` is the weights'."""
    # Here, because transformers takes memory, which an engine of the demo model does without.
    from bench.papers.measured.contiguous_model import ContiguousModel, ContiguousSequence

    model, decoded = ContiguousModel(dtype), decoded_of(length)
    text = _text(length)
    ContiguousSequence(model, text[:_WARM]).decode(2)
    model_bytes = _resident_bytes("VmRSS")
    kept: list[ContiguousSequence] = []

    def run() -> list[float]:
        kept.append(ContiguousSequence(model, text[: length - decoded - 1]))
        return kept[0].decode(decoded)

    seconds, peak_bytes = _peak_of(run)
    sizes = {"model_bytes": model_bytes, "peak_bytes": peak_bytes, "kv_bytes": kept[0].kv_bytes}
    terms = asdict(model.terms("a sequence"))
    return {**sizes, "weights_bytes": model.weights_bytes, "seconds": seconds, "dtype": dtype, "terms": terms}


def decoded_of(length: int) -> int:
    """Return how many tokens are decoded at the end of a sequence: 256, or half of a short one."""
    return min(MOST_DECODED, length // 2)


def _text(length: int) -> tuple[int, ...]:
    draw = random.Random(1)
    return tuple(draw.randrange(10, 1000) for _ in range(length))


def _peak_of(run: Callable[[], list[float]]) -> tuple[list[float], int]:
    """Return the result of a run, and the peak of the resident memory during it."""
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the present value
    return run(), _resident_bytes("VmHWM")


def _resident_bytes(name: str) -> int:
    """Return a number of /proc/self/status: VmRSS is resident now, VmHWM its peak."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, f"/proc/self/status has no {name}"
    return int(found[1]) * _KIB


def _wait_until_populated() -> None:
    """Wait until the whole pool is resident."""
    for thread in threading.enumerate():
        if thread.name == "populate":
            thread.join()
