"""Folders with the demo model's dequantized weights, for peers that cannot read its file.

`python -m bench.weights.peer_models FOLDER` writes `bfloat16` (for vLLM) and `float32` (for optimum-cli, which exports
models for openvino-genai) below the folder, and prints the commands of these exports and the variables of the results.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.native.formats.gguf.file import GgufFile, gguf_of
from services.models.model_store import default_cache, resolve

TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Weights by the variable that names their folder. Groups of 64, because 576 inputs are no multiple of 128.
EXPORTS = {
    "OPENVINO_MODEL": ("openvino", "--weight-format fp32"),
    "OPENVINO_MODEL_INT8": ("openvino-int8", "--weight-format int8"),
    "OPENVINO_MODEL_INT4": ("openvino-int4", "--weight-format int4 --sym --group-size 64 --ratio 1.0"),
}


def write_dequantized(source: Path, destination: Path, dtype: torch.dtype) -> None:
    """Write a Hugging Face folder with the values that a folder's GGUF file stands for, in a type.

    Raises ValueError if the folder has no such file.
    """
    gguf = gguf_of(source)
    if gguf is None:
        raise ValueError(f"{source} has no GGUF file")
    destination.mkdir(parents=True, exist_ok=True)
    file = GgufFile(gguf, dtype)
    tensors = {name: file.get_tensor(name).to(dtype).contiguous().clone() for name in file.keys()}  # noqa: SIM118
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    for path in (*source.glob("*.json"), *source.glob("*.jinja")):
        shutil.copy(path, destination)
    config = json.loads((source / "config.json").read_text())
    # Earlier versions of transformers, as peers have, know the names of the second line only.
    names = {"dtype": str(dtype).removeprefix("torch.")}
    names |= {"torch_dtype": names["dtype"], "rope_theta": config["rope_parameters"]["rope_theta"]}
    (destination / "config.json").write_text(json.dumps(config | names, indent=2) + "\n")


def export_commands(folder: Path) -> Iterator[str]:
    """Yield the commands that export the float32 folder, which need optimum-cli with openvino."""
    source = f"--model {folder / 'float32'} --task text-generation-with-past"
    for name, options in EXPORTS.values():
        yield f"optimum-cli export openvino {source} {options} {folder / name}"


def variables(folder: Path) -> Iterator[str]:
    """Yield the variables that name the folders, as lines for a shell."""
    yield f"export VLLM_MODEL={folder / 'bfloat16'}"
    for variable, (name, _) in EXPORTS.items():
        yield f"export {variable}={folder / name}"


def main() -> None:
    """Write the folders, and print what is left to do."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m bench.weights.peer_models FOLDER")
    folder = Path(sys.argv[1]).expanduser().resolve()
    source = resolve("demo", default_cache(), lambda *_: None)
    for name, dtype in TYPES.items():
        write_dequantized(source, folder / name, dtype)
    print(*export_commands(folder), *variables(folder), sep="\n")


if __name__ == "__main__":
    main()
