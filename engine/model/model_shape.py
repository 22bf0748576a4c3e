"""Memory needs of a model, from its configuration alone: no weights are read."""

import re
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.attention.cache import CacheGeometry
from engine.attention.declared_geometry import declared_geometry, latent_elements
from engine.attention.llama_shape import is_llama_shaped
from engine.errors import ModelUnsupported
from engine.model.gguf_configuration import gguf_configuration
from engine.model.loaded import context_tokens, vocabulary_size
from engine.model.packed_size import PackedSize, packed_size
from engine.model.sizing import RecordedSizes, StepSizes, check_ranks
from engine.model.text_part import folder_configuration, served_class
from engine.model.unsupported import configuration_fault, unknown_layer, unlike_served, unshared
from engine.native.formats.gguf.file import gguf_of
from engine.native.formats.image_text import IMAGE_TEXT_TYPES
from engine.native.formats.quantized.methods import scheme_of
from engine.native.formats.stored import WeightFormat, stored_format

# Every class has it, and it needs no library; a configuration may name another.
_ANY_ATTENTION = "eager"


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model for one dtype of weights, and one format of them on a CPU.

    `packed` has the sizes of weights on a CPU whose kernels run the model. `inner_size` is as in StepSizes.
    `whole_bytes` are the weights that each of several ranks has whole. `text_part_of` is the type of an image-text
    model, whose text part this is. `latent_elements` are those of a token's latents, where
    attention has such. `unshared` is why several ranks cannot share the model, empty if they can. `stored` is the
    format of the quantized weights in its files, empty without any.
    """

    geometry: CacheGeometry
    parameters: int
    weights_bytes: int
    packed: PackedSize
    context_tokens: int
    vocabulary_size: int
    hidden_size: int
    inner_size: int
    heads: int
    element_bytes: int
    whole_bytes: int
    ranks: int = 1
    text_part_of: str = ""
    latent_elements: int = 0
    unshared: str = ""
    stored: str = ""

    def of_rank(self, ranks: int) -> "ModelShape":
        """Return the sizes on each of several ranks. Raises ModelUnsupported if they cannot share the model."""
        if ranks == 1:
            return self
        if self.unshared:
            raise ModelUnsupported(self.unshared)
        check_ranks(ranks, self.heads, self.geometry)
        return replace(
            self,
            geometry=self.geometry.of_rank(ranks),
            weights_bytes=self.whole_bytes + (self.weights_bytes - self.whole_bytes) // ranks,
            packed=PackedSize(0, 0),
            inner_size=self.inner_size // ranks,
            ranks=ranks,
        )

    def step_sizes(self, token_budget: int, max_sequences: int) -> StepSizes:
        """Return what the memory of a step within these bounds depends on."""
        return StepSizes(token_budget, max_sequences, self.hidden_size, self.inner_size, self.vocabulary_size)

    def recorded_sizes(self, max_sequences: int, blocks: int) -> RecordedSizes:
        """Return what the memory of recorded steps depends on, for sequences of up to `blocks` blocks."""
        return RecordedSizes(max_sequences, blocks, self.vocabulary_size, self.element_bytes, self.ranks)


def read_shape(source: Path, dtype: torch.dtype, weights: WeightFormat = "auto") -> ModelShape:
    """Read the configuration of a folder or GGUF file. Raises ModelUnsupported with the reason.

    Whether the model can be served is only decided when it is loaded, unless its configuration already says why not.
    """
    try:
        return shape_of(_configuration(source), dtype, weights, source)
    except ModelUnsupported as error:
        raise ModelUnsupported(f"{source.name}: {error}") from error
    except Exception as error:  # transformers' classes compute with values as they are
        raise ModelUnsupported(f"{source.name}: {configuration_fault(error)}") from error


def shape_of(
    configuration: Any, dtype: torch.dtype, weights: WeightFormat = "auto", source: Path | None = None
) -> ModelShape:
    """Create the model on the meta device and measure it. `source` is the folder or file with its weights, if any.

    Raises ModelUnsupported and exceptions of transformers.
    """
    kind, served = served_class(configuration)
    with torch.device("meta"):
        model = kind._from_config(deepcopy(served), dtype=dtype, attn_implementation=_ANY_ATTENTION)
    if fault := unknown_layer(model.config.get_text_config()):
        raise ModelUnsupported(fault)
    try:
        shape = _measured(model, dtype, weights, source)
    except (AttributeError, ModelUnsupported) as error:
        raise ModelUnsupported(unlike_served(model) or str(error)) from error
    part_of = configuration.model_type if configuration.model_type in IMAGE_TEXT_TYPES else ""
    fault = unshared(model, **_sources(source), image_text=bool(part_of))
    return replace(shape, text_part_of=part_of, unshared=fault, stored=stored_format(source) if source else "")


def _sources(source: Path | None) -> dict[str, bool]:
    """Return which files a model's weights are in."""
    if source is None:
        return {"from_gguf": False, "quantized": False}
    from_gguf = source.is_file() or gguf_of(source) is not None
    return {"from_gguf": from_gguf, "quantized": not from_gguf and scheme_of(source) is not None}


def _measured(model: Any, dtype: torch.dtype, weights: WeightFormat, source: Path | None) -> ModelShape:
    config = model.config.get_text_config()
    return ModelShape(
        geometry=declared_geometry(config),
        parameters=sum(one.numel() for one in model.parameters()),
        weights_bytes=sum(one.nbytes for one in model.parameters()),
        packed=packed_size(model, weights, source) if dtype == torch.bfloat16 else PackedSize(0, 0),
        context_tokens=context_tokens(config),
        vocabulary_size=vocabulary_size(config),
        hidden_size=config.hidden_size,
        inner_size=_inner_size(config),
        heads=config.num_attention_heads,
        element_bytes=dtype.itemsize,
        whole_bytes=_whole_bytes(model),
        latent_elements=latent_elements(config),
    )


def _configuration(source: Path) -> Any:
    if source.is_dir():
        return folder_configuration(source)
    return gguf_configuration(source)


def _inner_size(config: Any) -> int:
    names = ("intermediate_size", "ffn_dim", "n_inner")
    found = next((size for name in names if (size := getattr(config, name, None))), 4 * config.hidden_size)
    plain = max(found) if isinstance(found, list) else found  # Gemma-3n has a size for each layer
    experts = getattr(config, "num_experts_per_tok", None) or 1
    return int(max(plain, (getattr(config, "moe_intermediate_size", None) or plain) * experts))


def _whole_bytes(model: Any) -> int:
    """Return the bytes of the weights that are not sliced: norms, or what transformers' plan does not name."""
    if is_llama_shaped(model):
        return sum(weights.nbytes for weights in model.parameters() if weights.dim() == 1)
    names = [re.sub(r"\\\*", r"[0-9]+", re.escape(name)) for name in model.tp_plan]
    sliced = re.compile(rf"(.*\.)?({'|'.join(names)})(\.weight|\.bias)?") if names else None
    return sum(weights.nbytes for name, weights in model.named_parameters() if not (sliced and sliced.fullmatch(name)))
