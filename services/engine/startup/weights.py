"""The format of a model's weights: what the settings request, and what its decoder keeps."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from engine.model.decoded_weights import decode
from engine.model.decoder import Decoder
from engine.model.loaded import LoadedModel, dtype_name, fingerprint_of, with_kv_dtype
from engine.model.packed_size import packed_matrices
from engine.native.decoder import NativeDecoder
from engine.native.formats.stored import WeightFormat, stored_format
from engine.native.kernels import Kernels
from services.engine.settings import EngineSettings
from services.runtime.settings import InvalidSetting

_AT_LOAD = ("int8", "int4")
_TO_LOAD: dict[str, WeightFormat] = {"": "bf16", "int8": "int8", "int4": "int4"}

log = logging.getLogger("quire.engine")


def packed_format(settings: EngineSettings, dtype: torch.dtype, kernels: Kernels | None) -> str:
    """Return the format in which the CPU's decoder is to keep a model's weights; empty if all are of `dtype`.

    It is int8, int4, or the format of the quantized weights in the model's files (`stored_format`). Raises
    InvalidSetting if the requested format cannot be kept, and ModelUnsupported if a file cannot be read.
    """
    requested = settings.weights
    if requested == "bf16" and dtype != torch.bfloat16:
        raise InvalidSetting(f"weights is 'bf16', but the model runs in {dtype_name(dtype)}: weights must be auto")
    fault = _fault(settings, dtype, kernels)
    if requested in _AT_LOAD:
        if fault:
            raise InvalidSetting(f"weights is {requested!r}, which only the CPU's kernels run, but {fault}")
        return requested
    folder = Path(settings.model)
    stored = stored_format(folder)
    if stored and requested == "bf16":
        fault = "weights is 'bf16'"
    if stored and not fault and not packed_matrices(folder):
        fault = "no kernel multiplies them as they are"
    if stored and fault:
        log.info("the weights in %s are dequantized to %s: %s", stored, dtype_name(dtype), fault)
    return "" if fault else stored


def weights_to_load(packed: str) -> WeightFormat:
    """Return how files are read for weights that are packed in this format (`LoadedModel.weights`)."""
    return _TO_LOAD.get(packed, "auto")


def kept(loaded: LoadedModel, decoder: Decoder, requested: str) -> LoadedModel:
    """Return the model as its decoder keeps it: the model's modules have no packed weights.

    Raises InvalidSetting if the settings require them.
    """
    if not loaded.weights or (isinstance(decoder, NativeDecoder) and decoder.from_files):
        return loaded
    reason = "the CPU's kernels do not run this model as a whole"
    if requested in _AT_LOAD:
        raise InvalidSetting(f"weights is {requested!r}, but {reason}")
    log.info("the weights in %s are dequantized to %s: %s", loaded.weights, dtype_name(loaded.dtype), reason)
    decode(loaded.model)
    assert loaded.folder is not None, "packed weights come from files"
    dense = replace(loaded, weights="", kv_dtype=None, fingerprint=fingerprint_of(loaded.folder, loaded.dtype))
    return with_kv_dtype(dense, loaded.kv_dtype)


def _fault(settings: EngineSettings, dtype: torch.dtype, kernels: Kernels | None) -> str:
    """Return why the CPU's decoder cannot run with these settings; empty if it can."""
    if settings.tensor_parallel > 1:
        return f"tensor_parallel is {settings.tensor_parallel}"
    if kernels is None:
        return "they are not used here"
    if dtype != torch.bfloat16:
        return f"the model runs in {dtype_name(dtype)}, not in bfloat16"
    return ""
