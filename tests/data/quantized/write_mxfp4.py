"""Writes the folder `mxfp4`: a tiny GPT-OSS whose experts are rounded to MXFP4 and dequantized by transformers.

Run it with the versions in README.md: `python write_mxfp4.py`. transformers quantizes with a kernel of the hub, which
needs a GPU; here a group's exponent is that of its largest weight, less 2, and weights are rounded to the nearest
number (OCP Microscaling Formats 1.0, 6.3). The dequantized values are those of transformers' own function.
`dequantized.json` is as in write_compressed.py, by the names that matrices of experts have one by one.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors
from write_digests import digest

HERE = Path(__file__).parent
_CONFIG = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": None,
    "tie_word_embeddings": True,
}
_NOT_CONVERTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def dense_model() -> GptOssForCausalLM:
    """Return the model before it is quantized. Biases and sinks are not zero."""
    torch.manual_seed(53)
    model = GptOssForCausalLM(GptOssConfig(**_CONFIG))
    with torch.no_grad():
        for name, one in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                one.normal_(std=0.3)
    return model.to(torch.bfloat16)


def quantized(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks and scales of `[experts, inputs, outputs]`."""
    groups = weights.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor().clamp(-125, 125) - 2
    numbers = torch.tensor(FP4_VALUES)
    codes = (groups[..., None] / torch.exp2(exponents)[..., None, None] - numbers).abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def write() -> None:
    folder = HERE / "mxfp4"
    shutil.rmtree(folder, ignore_errors=True)
    dense_model().save_pretrained(folder)
    path, digests = folder / "model.safetensors", {}
    stored = load_file(path)
    stored.pop("lm_head.weight", None)  # it is the embedding
    for name in [one for one in stored if one.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = quantized(stored.pop(name))
        stored |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
        experts, _, part = name.rpartition(".")
        for number, one in enumerate(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)):
            halves = {"gate": one[:, 0::2], "up": one[:, 1::2]} if part == "gate_up_proj" else {"down": one}
            digests |= {f"{experts}.{number}.{key}_proj.weight": digest(half.T) for key, half in halves.items()}
    save_file(stored, path, {"format": "pt"})
    configuration = json.loads((folder / "config.json").read_text())
    configuration["quantization_config"] = Mxfp4Config(modules_to_not_convert=_NOT_CONVERTED).to_dict()
    (folder / "config.json").write_text(json.dumps(configuration, indent=2) + "\n")
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "dequantized.json").write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    write()
