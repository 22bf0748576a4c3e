"""The demo model with a context of any length, perhaps of its first layers alone, for figures of long sequences.

Its weights were trained for 8,192 tokens, so what it says beyond is nonsense; how long a token takes is the same.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

# First, because it sets how threads of torch wait.
from bench.loads.engine_worker import BFLOAT16, demo_parts  # isort: skip
import torch
from safetensors.torch import load_file, save_file

from blocks import blocks_for
from services.engine.startup.assembly import EngineParts
from services.models.model_store import build_once, default_cache, resolve
from tests.dense_model import dense_folder

CONTEXT = 131_072
_SPARE_BLOCKS = 32


def long_folder(layers: int = 0) -> Path:
    """Return a folder with the demo model, whose configuration allows contexts of 131,072 tokens. Made once.

    With `layers`, later ones are not computed.
    """
    dense = dense_folder(resolve("demo", default_cache(), lambda *_: None))
    changes = {"max_position_embeddings": CONTEXT, **({"num_hidden_layers": layers} if layers else {})}
    made = dense.with_name("-".join([dense.name, *map(str, changes.values())]))
    build_once(made, lambda workshop: _changed(dense, changes, workshop / "model"), lambda *_: None)
    return made


def _changed(dense: Path, changes: Mapping[str, int], destination: Path) -> Path:
    destination.mkdir(parents=True)
    for file in dense.iterdir():
        if file.suffix == ".safetensors" and "num_hidden_layers" in changes:
            save_file(_first_layers(file, changes["num_hidden_layers"]), destination / file.name, {"format": "pt"})
        elif file.name != "config.json":
            os.link(file.resolve(), destination / file.name)
    config = json.loads((dense / "config.json").read_text())
    (destination / "config.json").write_text(json.dumps(config | changes))
    return destination


def _first_layers(file: Path, layers: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a file without those of later layers."""
    numbered = ((name, re.search(r"layers\.(\d+)\.", name), one) for name, one in load_file(file).items())
    return {name: one for name, number, one in numbered if not number or int(number[1]) < layers}


def long_parts(tokens: int, page_size: int, *, token_budget: int = 512, layers: int = 0) -> EngineParts:
    """Return an engine of the CPU backend, in bfloat16, whose pool holds this many tokens in blocks of `page_size`."""
    blocks = blocks_for(tokens, page_size) + _SPARE_BLOCKS
    more = {"device": "cpu", "attention_backend": "cpu", "block_size": page_size, "token_budget": token_budget}
    return demo_parts(blocks, model=str(long_folder(layers)), **more, **BFLOAT16)
