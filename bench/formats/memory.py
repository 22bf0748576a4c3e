"""Memory of loading a folder with the shape of Llama 3.2 1B, in a process of its own, until a step can run.

`python -m bench.formats.memory FOLDER` prints bytes as JSON: anonymous memory before, its peak, and of packed weights.
Pages of mapped files do not count: the system can drop them.
"""

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.report.results import Row, row
from bench.report.terms import Terms

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCABULARY = 16, 2048, 8192, 32, 8, 128256
GROUP = 128
_SECONDS = 0.002  # between two samples
_MEGA = 1e6


def measured(folder: Path, demo: Path) -> dict[str, int]:
    """Write the folder, with the demo model's tokenizer, and return what the process prints."""
    model = folder / "llama-1b"
    write_random(model)
    shutil.copy(demo / "tokenizer.json", model)
    command = [sys.executable, "-m", "bench.formats.memory", str(model)]
    found: dict[str, int] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def rows_of(used: dict[str, int]) -> list[Row]:
    """Return the rows: the peak beyond the packed weights, and what it consists of."""
    beyond = used["peak"] - used["before"] - used["packed"]
    terms = {"quire": Terms(weights="gptq", work="load of a 1B-shaped folder")}
    return [
        row("formats", "load_peak_beyond_packed_mb", round(beyond / _MEGA, 1), "MB", terms=terms),
        *(row("formats", f"load_{name}_mb", round(size / _MEGA, 1), "MB", terms=terms) for name, size in used.items()),
    ]


def write_random(folder: Path) -> None:
    """Write random weights in GPTQ's 4 bits, the embedding in bfloat16."""
    from transformers import LlamaConfig

    folder.mkdir()
    declared = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=True, dtype="bfloat16", quantization_config=declared)
    config.save_pretrained(folder)
    save_file(_tensors(), folder / "model.safetensors", {"format": "pt"})


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {"model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator).bfloat16()}
    keys = HIDDEN // HEADS * KV_HEADS
    shapes = {
        **{f"self_attn.{one}_proj": (HIDDEN if one in "qo" else keys, HIDDEN) for one in "qkvo"},
        **{f"mlp.{one}_proj": (INTERMEDIATE, HIDDEN) for one in ("gate", "up")},
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    for layer in range(LAYERS):
        for name, (outputs, inputs) in shapes.items():
            module = f"model.layers.{layer}.{name}"
            words = torch.randint(-(1 << 31), 1 << 31, (inputs // 8, outputs), generator=generator, dtype=torch.int64)
            found[f"{module}.qweight"] = words.to(torch.int32)
            found[f"{module}.qzeros"] = torch.full((inputs // GROUP, outputs // 8), 0x77777777, dtype=torch.int32)
            found[f"{module}.scales"] = torch.full((inputs // GROUP, outputs), 0.25 * inputs**-0.5).half()
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{norm}.weight"] = torch.ones(HIDDEN).bfloat16()
    return found | {"model.norm.weight": torch.ones(HIDDEN).bfloat16()}


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class _Peak(threading.Thread):
    """Samples anonymous memory until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self._done = 0, threading.Event()

    def run(self) -> None:
        while not self._done.wait(_SECONDS):
            self.most = max(self.most, _anonymous())

    def stop(self) -> int:
        """Return the most bytes."""
        self._done.set()
        self.join()
        return self.most


def main(folder: str) -> None:
    """Load the folder as an engine does at its first start."""
    from bench.loads.engine_worker import demo_parts
    from engine.model.model_shape import read_shape

    packed = read_shape(Path(folder), torch.bfloat16).packed.packed
    demo_parts(8)  # libraries and the machine's kernels are loaded
    before, peak = _anonymous(), _Peak()
    peak.start()
    parts = demo_parts(8, model=folder, host_blocks=0)
    most = peak.stop()
    assert parts.loaded.weights, "the weights are packed"
    print(json.dumps({"before": before, "peak": most, "packed": packed}))


if __name__ == "__main__":
    main(sys.argv[1])
