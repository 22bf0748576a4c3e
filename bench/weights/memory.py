"""Memory of the engine's process of `quire serve` with the demo model, beyond the model's file and the KV pool."""

from pathlib import Path

import psutil

from bench.loads.ceiling import ModelCosts
from bench.loads.stream_client import request_of
from bench.report.results import Row, row
from bench.report.terms import Terms
from tests.running_quire import start_quire

MEGA = 1e6
BLOCK_SIZE = 16
# So few that the whole pool, which is subtracted, is little beside the rest.
DEVICE_BLOCKS = 256
PROMPT_TOKENS, NEW_TOKENS = 128, 32


def measured(folder: Path, costs: ModelCosts) -> dict[str, int]:
    """Return bytes: of the process after a request, of the model's files, and of the pool with its spare block.

    Resident memory includes pages of libraries that other processes share; the proportional set size (PSS) divides
    these by the number of processes.
    """
    quire = start_quire("--model", "demo", "--device-blocks", str(DEVICE_BLOCKS), "--dtype", "auto")
    try:
        request = request_of({"prompt": list(range(100, 100 + PROMPT_TOKENS)), "tokens": NEW_TOKENS})
        assert len(quire.generate(request).token_ids) == NEW_TOKENS
        used = psutil.Process(quire.children()["engine"]).memory_full_info()
    finally:
        quire.close()
    pool = (DEVICE_BLOCKS + 1) * BLOCK_SIZE * costs.key
    return {"resident": used.rss, "proportional": used.pss, "file": file_bytes(folder), "pool": pool}


def file_bytes(folder: Path) -> int:
    """Return the bytes of the files with a model's weights."""
    files = [*folder.glob("*.gguf")] or [*folder.glob("*.safetensors")]
    return sum(file.stat().st_size for file in files)


def rows_of(used: dict[str, int], served: Terms) -> list[Row]:
    """Return the rows; resident memory is compared with the target. `served` are the terms of `quire serve`."""
    terms = {"quire": served}
    beyond = used["resident"] - used["file"] - used["pool"]
    return [
        *(row("weights", f"memory_{name}_mb", round(size / MEGA, 1), "MB", terms=terms) for name, size in used.items()),
        row("weights", "memory_beyond_file_and_pool_mb", round(beyond / MEGA, 1), "MB", terms=terms),
    ]
