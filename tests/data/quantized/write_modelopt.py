"""Writes the folders `modelopt-*`: tiny Llama checkpoints, quantized and exported by NVIDIA's ModelOpt.

Run it with the versions in README.md: `python write_modelopt.py`. `dequantized.json` is as in write_compressed.py, of
the weights as ModelOpt's own tensors dequantize them.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from write_digests import digest

HERE = Path(__file__).parent
_CONFIGURATIONS = {
    "modelopt-fp8": mtq.FP8_DEFAULT_CFG,
    "modelopt-fp8-channel": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
    "modelopt-fp8-block": mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG,
    "modelopt-nvfp4": mtq.NVFP4_DEFAULT_CFG,
}
_UNTIED = ("modelopt-nvfp4",)  # its head is no embedding
_UNDECLARED = "modelopt-nvfp4"  # in config.json, as of older versions


def dense_model(name: str) -> Any:
    """Return the model before it is quantized. Of blocks of 128, the last of a side is smaller."""
    torch.manual_seed(53)
    return LlamaForCausalLM(
        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=300,
            hidden_size=64,
            intermediate_size=160 if name == "modelopt-fp8-block" else 128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.3,
            bos_token_id=1,
            eos_token_id=0,
            tie_word_embeddings=name not in _UNTIED,
        )
    ).to(torch.bfloat16)


def dequantized(module: str, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the weights of a module in float32."""
    weight, scale = (stored[f"{module}.{suffix}"] for suffix in ("weight", "weight_scale"))
    if weight.dtype == torch.uint8:
        shape = torch.Size((weight.shape[0], 2 * weight.shape[1]))
        double = stored[f"{module}.weight_scale_2"]
        packed = NVFP4QTensor(shape, torch.float32, weight)
        return packed.dequantize(scale=scale, double_scale=double, block_sizes={-1: 16})
    packed = FP8QTensor(weight.shape, torch.float32, weight)
    if scale.ndim == 4:
        return packed.dequantize(scale=scale[:, 0, :, 0], block_sizes={0: 128, 1: 128})
    return packed.dequantize(scale=scale[:, None] if scale.ndim else scale)


def write(name: str) -> None:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model = mtq.quantize(dense_model(name), _CONFIGURATIONS[name], lambda one: one(torch.randint(0, 300, (2, 32))))
    export_hf_checkpoint(model, export_dir=folder)
    stored = load_file(folder / "model.safetensors")
    modules = [key.removesuffix(".weight_scale") for key in stored if key.endswith(".weight_scale")]
    matrices = {f"{one}.weight": digest(dequantized(one, stored)) for one in modules}
    (folder / "generation_config.json").unlink(missing_ok=True)
    if name == _UNDECLARED:
        configuration = json.loads((folder / "config.json").read_text())
        del configuration["quantization_config"]
        (folder / "config.json").write_text(json.dumps(configuration, indent=2) + "\n")
    else:
        (folder / "hf_quant_config.json").unlink()
    (folder / "dequantized.json").write_text(json.dumps(matrices, indent=1) + "\n")


if __name__ == "__main__":
    for one in _CONFIGURATIONS:
        write(one)
