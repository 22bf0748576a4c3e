"""The demo model with a context of any length, for figures of long sequences.

Its weights were trained for 8,192 tokens, so what it says beyond is nonsense; how long a token takes is the same.
"""

import json
import os
from pathlib import Path

# First, because it sets how threads of torch wait.
from bench.loads.engine_worker import BFLOAT16, demo_parts  # isort: skip
from blocks import blocks_for
from services.engine.startup.assembly import EngineParts
from services.models.model_store import build_once, default_cache, resolve
from tests.dense_model import dense_folder

CONTEXT = 131_072
_SPARE_BLOCKS = 32


def long_folder() -> Path:
    """Return a folder with the demo model, whose configuration allows contexts of 131,072 tokens. Made once."""
    dense = dense_folder(resolve("demo", default_cache(), lambda *_: None))
    made = dense.with_name(f"{dense.name}-{CONTEXT}")
    build_once(made, lambda workshop: _with_context(dense, workshop / "model"), lambda *_: None)
    return made


def _with_context(dense: Path, destination: Path) -> Path:
    destination.mkdir(parents=True)
    for file in dense.iterdir():
        if file.name != "config.json":
            os.link(file.resolve(), destination / file.name)
    config = json.loads((dense / "config.json").read_text())
    (destination / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return destination


def long_parts(tokens: int, page_size: int, *, token_budget: int = 512) -> EngineParts:
    """Return an engine of the CPU backend, in bfloat16, whose pool holds this many tokens in blocks of `page_size`."""
    blocks = blocks_for(tokens, page_size) + _SPARE_BLOCKS
    more = {"device": "cpu", "attention_backend": "cpu", "block_size": page_size, "token_budget": token_budget}
    return demo_parts(blocks, model=str(long_folder()), **more, **BFLOAT16)
