"""Loads a model's weights tensor by tensor: no second copy in host memory, nor on the device.

transformers makes the modules without memory, and asks for each tensor when it has its place: it renames, stacks and
converts as its families need, and ties what they share. This module gives it the tensors, on their device. Those that
`engine.gpu.llama` multiplies together are placed side by side, so that it finds its matrices ready.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.integrations.heterogeneity import AmbiguousGlobalPerLayerAttributeError
from transformers.pytorch_utils import Conv1D

from engine.attention.interface import ATTENTION_NAME
from engine.attention.llama_shape import fused_parts
from engine.errors import ModelUnsupported
from engine.model.checkpoint import Checkpoint
from engine.model.decoded_weights import LOADED_BYTES, decode_on_use, placeholder
from engine.model.staging import Staging, cuda_staging
from engine.model.text_part import folder_configuration, served_class
from engine.native.formats.image_text import IMAGE_TEXT_TYPES
from engine.native.formats.stored import WeightFormat, is_matrix

_SHOWN = 3


@dataclass
class WeightReader:
    """Reads the tensors of a checkpoint to one device, each once. Without staging they stay mapped in host memory.

    transformers may read with several threads.

    `together` has the names of tensors whose rows are placed side by side, in `dtype`; others keep the files' type.
    With `on_use`, quantized matrices are placeholders, see `engine.model.decoded_weights`.
    """

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    staging: Staging | None = None
    together: list[tuple[str, ...]] = field(default_factory=list)
    on_use: bool = False

    def __post_init__(self) -> None:
        self._groups = {name: names for names in self.together for name in names}
        self._matrices: dict[tuple[str, ...], torch.Tensor] = {}

    def tensors(self) -> dict[str, "FileTensor"]:
        """Return all tensors, not read yet."""
        return {name: FileTensor(self, name) for name in self.checkpoint.names}

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor on the device."""
        handle = self.checkpoint.stored(name)
        if self.on_use and is_matrix(handle):
            return placeholder(handle, self.dtype)
        stored = handle[...]
        if self.staging is None:
            return stored
        grouped = name in self._groups
        place = self._place(name) if grouped else torch.empty(stored.shape, dtype=stored.dtype, device=self.device)
        self.staging.copy(stored, place)
        return place

    def _place(self, name: str) -> torch.Tensor:
        """Return the rows for a tensor, in one matrix with those of its group."""
        names = self._groups[name]
        shapes = [self.checkpoint.stored(one).get_shape() for one in names]
        rows = [shape[0] for shape in shapes]
        if names not in self._matrices:  # of two threads that find none, one makes the matrix
            matrix = torch.empty([sum(rows), *shapes[0][1:]], dtype=self.dtype, device=self.device)
            self._matrices.setdefault(names, matrix)
        return torch.split(self._matrices[names], rows)[names.index(name)]


class FileTensor:
    """A tensor of a checkpoint that `[...]` reads, like the handles of safetensors that transformers works with."""

    def __init__(self, reader: WeightReader, name: str) -> None:
        self._reader = reader
        self._name = name

    def __getitem__(self, _all: EllipsisType) -> torch.Tensor:
        return self._reader.read(self._name)


def load_modules(
    folder: Path, dtype: torch.dtype, device: torch.device, weights: WeightFormat = "auto", *, packed: bool = False
) -> Any:
    """Load the modules of a folder with safetensors or GGUF files, with paged attention, which must be registered.

    What the file has quantized, or `weights` quantizes, becomes dense: values of `dtype`. With `packed`, because a
    decoder has the weights too, large models decode them where they are used.

    Raises ModelUnsupported, naming the tensor, if one is missing, unknown or has another shape than its place.
    """
    checkpoint = Checkpoint(folder, dtype, weights)
    matrices = {name: one for name in checkpoint.names if is_matrix(one := checkpoint.stored(name))}
    size = sum(prod(one.get_shape()) for one in matrices.values()) * dtype.itemsize
    reader = WeightReader(checkpoint, dtype, device, on_use=packed and size > LOADED_BYTES)
    if reader.on_use:
        model = modules_of(reader, folder)
        decode_on_use(model, matrices)
        return model
    if device.type != "cpu":
        reader = gpu_reader(reader, folder, cuda_staging(device))
    return modules_of(reader, folder)


def gpu_reader(reader: WeightReader, folder: Path, staging: Staging) -> WeightReader:
    """Return the reader with staging, and with the tensors together that the GPU's decoder multiplies together."""
    _, config = served_class(folder_configuration(folder))
    names, checkpoint = set(reader.checkpoint.names), reader.checkpoint
    groups = [group for group in fused_parts(config) if names.issuperset(group)]
    together = [group for group in groups if len({tuple(checkpoint.stored(one).get_shape()[1:]) for one in group}) == 1]
    return WeightReader(checkpoint, reader.dtype, reader.device, staging, together)


def modules_of(reader: WeightReader, folder: Path) -> Any:
    """Return transformers' modules with the weights of a reader. Raises ModelUnsupported as `load_modules`."""
    whole = folder_configuration(folder)
    kind, config = served_class(whole)
    # `check_complete` says in a line what the report says of all tensors. An error of conversion refers to the report.
    report = _without("LOAD REPORT", "transformers.modeling_utils", unless="CONVERSION")
    try:
        with report:
            model, found = kind.from_pretrained(
                None,
                config=config,
                state_dict=reader.tensors(),
                dtype=reader.dtype,
                device_map=None if reader.device.type == "cpu" else {"": reader.device},
                attn_implementation=ATTENTION_NAME,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
            )
    except (torch.OutOfMemoryError, AmbiguousGlobalPerLayerAttributeError):
        raise
    except RuntimeError as error:  # experts of which one lacks a matrix, or a tied head of another shape
        raise ModelUnsupported(f"its tensors cannot be joined to its modules': {error}") from error
    if reader.staging:
        reader.staging.finish()
    check_linear(model, reader.checkpoint)
    found["unexpected_keys"] = {one for one in found["unexpected_keys"] if not reader.checkpoint.adds_nothing(one)}
    # Of image-text checkpoints only the tensors of the text part are given; those of other parts are known to be extra.
    check_complete(found, extras_allowed=config is not whole and whole.model_type not in IMAGE_TEXT_TYPES)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    elif model.can_generate():
        model.generation_config = GenerationConfig.from_model_config(whole)
    return model


def without_flags_warning() -> AbstractContextManager[None]:
    """Drop transformers' warning that flags of a `generation_config.json` may be ignored.

    It means a temperature without `do_sample`, and the like. Requests get these flags as their defaults.
    """
    return _without("generation flags are not valid", "transformers.generation.configuration_utils")


@contextmanager
def _without(text: str, source: str, unless: str | None = None) -> Iterator[None]:
    """Drop the records of a logger that have a text, but not another one."""

    def is_kept(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return text not in message or (unless is not None and unless in message)

    logger = logging.getLogger(source)
    logger.addFilter(is_kept)
    try:
        yield
    finally:
        logger.removeFilter(is_kept)


def check_linear(model: Any, checkpoint: Checkpoint) -> None:
    """Raise ModelUnsupported, naming the tensor, if one is quantized whose module has it the other way round."""
    for name, module in model.named_modules():
        stored = f"{name}.weight"
        if isinstance(module, Conv1D) and stored in checkpoint.names and is_matrix(checkpoint.stored(stored)):
            raise ModelUnsupported(f"its tensor {stored} is quantized, which is not served in modules of type Conv1D")


def check_complete(found: dict[str, Any], *, extras_allowed: bool) -> None:
    """Raise ModelUnsupported, naming the tensor, if transformers' loading info (`found`) has faults."""
    if missing := found["missing_keys"]:
        raise ModelUnsupported(f"its files lack the {_listed(missing)}")
    if mismatched := found["mismatched_keys"]:
        name, given, expected = min(mismatched)
        raise ModelUnsupported(f"its tensor {name} has shape {tuple(given)}, but its configuration {tuple(expected)}")
    if (extra := found["unexpected_keys"]) and not extras_allowed:
        raise ModelUnsupported(f"its files have the unknown {_listed(extra)}")
    if faults := found["error_msgs"]:
        raise ModelUnsupported(str(faults[0]))


def _listed(names: set[str]) -> str:
    """Return a few names, in order of their numbers."""
    ordered = sorted(names, key=lambda name: [part.zfill(9) for part in re.split(r"(\d+)", name)])
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return f"{'tensor' if len(ordered) == 1 else 'tensors'} {', '.join(ordered[:_SHOWN])}{more}"
