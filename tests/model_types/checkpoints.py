"""Random checkpoints, all of whose parameters matter: also those that transformers leaves constant or unwritten."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.model_types.cases import Case, configuration
from tests.tiny_models import VOCABULARY

# How far constants are moved: norms are 1, biases, sinks and corrections of routers are 0.
_SPREAD = 0.2


def write_checkpoint(case: Case, folder: Path) -> list[str]:
    """Write the checkpoint of a case, always the same; return the tensors whose memory transformers never wrote."""
    torch.manual_seed(3)
    with _unwritten_as_nan():
        model = AutoModelForCausalLM.from_config(configuration(case), dtype=torch.float32)
    unwritten = sorted(_randomize(model))
    model.save_pretrained(folder)
    return unwritten


def write_served(case: Case, folder: Path, tokenizer: Path) -> None:
    """Write the checkpoint of a case with the tokenizer of another model, and with the vocabulary of that."""
    vocabularies = {name: VOCABULARY for name in ("vocab_size", *case.given) if name.startswith("vocab_size")}
    write_checkpoint(Case(*case[:2], case.given | vocabularies), folder)
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, folder)


def _randomize(model: Any) -> Iterator[str]:
    """Move constants by random numbers, and replace values that are not finite; yield the names of these."""
    for name, tensor in _stored(model):
        if not torch.isfinite(tensor).all():
            yield name
            tensor.normal_(0, _SPREAD)
        elif (tensor == tensor.flatten()[0]).all():
            tensor.add_(torch.randn_like(tensor), alpha=_SPREAD)


def _stored(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers of the checkpoint that hold real numbers, tied ones once."""
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and tensor.numel() and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield name, tensor


@contextmanager
def _unwritten_as_nan() -> Iterator[None]:
    """Let torch fill new memory with NaN, so that what nobody writes is found."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
