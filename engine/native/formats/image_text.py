"""Image-text checkpoints: the tensors of their text part, under the names of a text model. The others are not read."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Values of model_type in config.json. Each is compared with transformers' whole model in
# tests/engine/model/test_image_text.py.
IMAGE_TEXT_TYPES = frozenset(
    (
        *("aria", "aya_vision", "cohere2_vision", "deepseek_vl", "exaone4_5", "gemma3", "glm46v", "glm4v", "glm4v_moe"),
        *("got_ocr2", "idefics2", "idefics3", "internvl", "janus", "lighton_ocr", "llava", "llava_next"),
        *("llava_next_video", "llava_onevision", "mistral3", "ovis2", "paligemma", "qwen2_5_vl", "qwen2_vl"),
        *("qwen3_vl", "qwen3_vl_moe", "smolvlm", "video_llama_3", "video_llava", "vipllava"),
    )
)
# Files of several generations of transformers, whose `conversion_mapping.py` (5.23) renames them likewise. Those of
# Qwen2-VL have the text model without a prefix, beside `visual`.
_PART = r"(model\.)?(language_model|text_model)\.(model\.)*"
_HEAD = re.compile(rf"({_PART})?lm_head\.(?P<rest>.+)")
_MODEL = re.compile(rf"{_PART}(?P<rest>.+)|model\.(?P<plain>(embed_tokens|layers|norm)\..+)")


class RenamedTensor:
    """A file whose tensor `stored` is read under another name."""

    def __init__(self, file: Any, stored: str) -> None:
        self._file, self._stored = file, stored

    def get_slice(self, _name: str) -> Any:
        """Return the tensor's handle, a StoredTensor."""
        return self._file.get_slice(self._stored)


def image_text_type(folder: Path) -> str:
    """Return the model type of an image-text checkpoint, from its config.json; empty for other models."""
    try:
        declared = json.loads((folder / "config.json").read_bytes())["model_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # reported where the configuration is needed
        return ""
    return declared if isinstance(declared, str) and declared in IMAGE_TEXT_TYPES else ""


def text_tensors(folder: Path, files: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file of each tensor of a folder's text model. `files` has that of each stored tensor."""
    if not image_text_type(folder):
        return dict(files)
    named = {text_name(stored): (file, stored) for stored, file in files.items()}
    return {name: RenamedTensor(*found) for name, found in named.items() if name}


def text_name(stored: str) -> str:
    """Return a tensor's name in the text model; empty for those of other parts."""
    if head := _HEAD.fullmatch(stored):
        return f"lm_head.{head['rest']}"
    found = _MODEL.fullmatch(stored)
    return f"model.{found['rest'] or found['plain']}" if found else ""
