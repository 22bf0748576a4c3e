"""A random model as files, like those that are downloaded."""

import gc
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers.integrations.accelerate as placement
from transformers import AutoModelForCausalLM, LlamaConfig


def save_random_model(folder: Path, config: dict[str, Any], shard_bytes: int, device: torch.device) -> int:
    """Save a model in bfloat16 as config.json and several safetensors files; return the number of the latter.

    The numbers are made on the device, because the host takes minutes for a billion of them.
    """
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = AutoModelForCausalLM.from_config(LlamaConfig(**config))
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return len(list(folder.glob("*.safetensors")))


def load_without_accelerate() -> None:
    """Let transformers load to a GPU although the package accelerate is missing.

    It asks for the package before, but uses it only for models on several devices.
    """
    if not find_spec("accelerate"):
        placement.is_accelerate_available = lambda: True
