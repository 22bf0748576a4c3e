"""Checks a GGUF file before any process starts: its header, the types and bounds of the metadata that is read."""

from pathlib import Path

from engine.errors import ModelUnsupported
from engine.native.formats.gguf.arrays import check_bytes, check_numbers, check_texts
from engine.native.formats.gguf.header import GgufHeader, read_header
from engine.native.formats.gguf.llama_names import ARCHITECTURES, names_of
from engine.native.formats.gguf.llama_tensors import check_tensors
from engine.native.formats.gguf.metadata_sizes import check_sizes
from services.models.files.bounded_json import InvalidModelFile
from services.models.files.chat_templates import TemplateSource
from services.models.files.numbers import (
    Context,
    Epsilon,
    Experts,
    Factor,
    FactorOrZero,
    FileSchema,
    Heads,
    Layers,
    RotationBase,
    Size,
    SizeOrNone,
    TokenId,
    Window,
    said,
)
from services.models.files.schemas import check_schema
from services.models.files.template_language import InvalidTemplate
from services.models.gguf.metadata import CHARSMAP, MERGES, SCORES, TEMPLATE, TOKENS, TYPES

_ARCHITECTURE = "general.architecture"
# Keys that do not have the architecture's name in front.
_COMMON = ("general.", "tokenizer.")


class GgufMetadata(FileSchema):
    """Metadata of a GGUF file, without the name of its architecture in front."""

    context_length: Context | None = said("tokens of the context")
    embedding_length: Size | None = said("elements of a token's state")
    block_count: Layers | None = said("layers")
    feed_forward_length: Size | None = said("elements inside the MLP")
    vocab_size: Size | None = said("tokens of the vocabulary")
    expert_count: Experts | None = said("experts of a layer")
    expert_used_count: Experts | None = said("experts of a token")
    expert_feed_forward_length: SizeOrNone | None = said("elements inside an expert")
    heads: Heads | None = said("attention heads of a layer", "attention.head_count")
    kv_heads: Heads | None = said("heads of keys and values of a layer", "attention.head_count_kv")
    key_length: Size | None = said("elements of a head", "attention.key_length")
    value_length: Size | None = said("elements of a head's value", "attention.value_length")
    window: Window | None = said("tokens that a token sees", "attention.sliding_window")
    rms_epsilon: Epsilon | None = said("added to the mean square before the root", "attention.layer_norm_rms_epsilon")
    epsilon: Epsilon | None = said("added to the variance before the root", "attention.layer_norm_epsilon")
    base: RotationBase | None = said("the base of the rotations", "rope.freq_base")
    rotated: SizeOrNone | None = said("elements of a head that are rotated", "rope.dimension_count")
    scaling: Factor | None = said("by how much the context is extended", "rope.scaling.factor")
    attention_factor: Factor | None = said("by how much scaling multiplies rotations", "rope.scaling.attn_factor")
    original_context: Context | None = said("the context before scaling", "rope.scaling.original_context_length")
    logit_scale: FactorOrZero | None = said("the factor of logits")
    attention_cap: FactorOrZero | None = said("the cap of attention scores", "attn_logit_softcapping")
    logit_cap: FactorOrZero | None = said("the cap of logits", "final_logit_softcapping")
    clamp: FactorOrZero | None = said("the bound of queries, keys and values", "attention.clamp_kqv")
    scale: FactorOrZero | None = said("the factor of attention scores", "attention.scale")
    linear_scale: FactorOrZero | None = said("by how much the context is extended, in older files", "rope.scale_linear")
    scaling_type: str | None = said("the kind of scaling", "rope.scaling.type")
    causal: bool | None = said("whether tokens see earlier ones only", "attention.causal")

    name: str | None = said("the name of the model", "general.name")
    tokenizer_model: str | None = said("the kind of vocabulary", "tokenizer.ggml.model")
    pre: str | None = said("how texts are split into words", "tokenizer.ggml.pre")
    template: str | None = said("how a chat becomes a text", "tokenizer.chat_template")
    adds_bos: bool | None = said("whether a text gets a token at its start", "tokenizer.ggml.add_bos_token")
    adds_eos: bool | None = said("whether a text gets a token at its end", "tokenizer.ggml.add_eos_token")
    adds_space: bool | None = said("whether a text gets a space at its start", "tokenizer.ggml.add_space_prefix")
    joins_spaces: bool | None = said("whether several spaces become one", "tokenizer.ggml.remove_extra_whitespaces")
    lowercase: bool | None = said("whether a text becomes lower case", "tokenizer.ggml.normalizer.lowercase")
    strips_accents: bool | None = said("whether a text loses accents", "tokenizer.ggml.normalizer.strip_accents")

    bos: TokenId | None = said("the token at the start of a text", "tokenizer.ggml.bos_token_id")
    eos: TokenId | None = said("the token at the end of a text", "tokenizer.ggml.eos_token_id")
    eot: TokenId | None = said("the token at the end of a turn", "tokenizer.ggml.eot_token_id")
    eom: TokenId | None = said("the token at the end of a message", "tokenizer.ggml.eom_token_id")
    unknown: TokenId | None = said("the token of unknown text", "tokenizer.ggml.unknown_token_id")
    padding: TokenId | None = said("the token that fills batches", "tokenizer.ggml.padding_token_id")
    separator: TokenId | None = said("the token between texts", "tokenizer.ggml.seperator_token_id")  # as llama.cpp
    cls: TokenId | None = said("the token of a text's class", "tokenizer.ggml.cls_token_id")
    mask: TokenId | None = said("the token of hidden text", "tokenizer.ggml.mask_token_id")
    fim_pad: TokenId | None = said("a token that fills a file", "tokenizer.ggml.fim_pad_token_id")
    fim_rep: TokenId | None = said("the token before a repository's name", "tokenizer.ggml.fim_rep_token_id")
    fim_sep: TokenId | None = said("the token between files", "tokenizer.ggml.fim_sep_token_id")
    fim_pre: TokenId | None = said("the token before what precedes a gap", "tokenizer.ggml.fim_pre_token_id")
    fim_suf: TokenId | None = said("the token before what follows a gap", "tokenizer.ggml.fim_suf_token_id")
    fim_mid: TokenId | None = said("the token before what fills a gap", "tokenizer.ggml.fim_mid_token_id")


def check_gguf(path: Path) -> tuple[Path, ...]:
    """Check the headers of a GGUF file and of its further parts; return the paths of all parts.

    Its tensors lie in the files, and its metadata have their types and bounds. Raises InvalidModelFile.
    """
    try:
        header = read_header(path)
    except ModelUnsupported as error:  # with the name of the part
        raise InvalidModelFile(str(error)) from error
    try:
        _check_header(path.name, header)
    except ModelUnsupported as error:
        raise InvalidModelFile(f"{path.name}: {error}") from error
    return header.files


def _check_header(name: str, header: GgufHeader) -> None:
    """Raise InvalidModelFile or ModelUnsupported if the metadata or the tensors are not as they should be."""
    _check_metadata(name, header)
    _check_arrays(header)
    _check_ids(header)
    check_sizes(header)
    if header.architecture in ARCHITECTURES:
        names_of(header)
        check_tensors(header)


def keys(architecture: str) -> dict[str, str]:
    """Return the fields of GgufMetadata by the keys under which a file of an architecture has them."""
    aliases = ((field.alias or name) for name, field in GgufMetadata.model_fields.items())
    return {one if one.startswith(_COMMON) else f"{architecture}.{one}": one for one in aliases}


def _check_architecture(header: GgufHeader) -> None:
    """Raise ModelUnsupported unless a file names its architecture, and has metadata of it."""
    if _ARCHITECTURE not in header.metadata:
        raise ModelUnsupported(f"its metadata lacks {_ARCHITECTURE} (the family of the model)")
    if not isinstance(header.metadata[_ARCHITECTURE], str):
        raise ModelUnsupported(f"its {_ARCHITECTURE} is {header.said(_ARCHITECTURE)}, not a text")
    if not any(key.startswith(f"{header.architecture}.") for key in header.metadata):
        raise ModelUnsupported(f"its {_ARCHITECTURE} is {header.said(_ARCHITECTURE)!r}, but no metadata have this name")


def _check_metadata(name: str, header: GgufHeader) -> None:
    """Check all that is one value. Raises InvalidModelFile, and ModelUnsupported for the architecture."""
    _check_architecture(header)
    known = keys(header.architecture)
    layered = header.architecture in ARCHITECTURES
    for key in known:
        if key in header.arrays and not (layered and header.metadata[key] is not None):
            raise InvalidModelFile(f"{name}: its {key} is an array, and only one {_sort(known[key])} is read")
    check_schema(name, GgufMetadata, {known[key]: one for key, one in header.metadata.items() if key in known})
    try:
        if template := header.metadata.get(TEMPLATE):
            TemplateSource(template, f"{name}: {TEMPLATE}").check()
    except InvalidTemplate as error:
        raise InvalidModelFile(str(error)) from error


def _sort(alias: str) -> str:
    return "value" if alias.startswith(_COMMON) else "number for all layers"


def _check_arrays(header: GgufHeader) -> None:
    """Raise ModelUnsupported, with the key, for an array of other elements than its key has."""
    for key in (TOKENS, MERGES):
        check_texts(header, key)
    check_numbers(header, TYPES, "iu")
    check_numbers(header, SCORES, "iuf")
    check_bytes(header, CHARSMAP)


def _check_ids(header: GgufHeader) -> None:
    """Raise ModelUnsupported, with the key, for the id of a token beyond the vocabulary."""
    if not (tokens := header.arrays.get(TOKENS)):
        return
    for key in keys(header.architecture):
        if key.endswith("_token_id") and header.metadata.get(key, 0) >= tokens.elements:
            raise ModelUnsupported(f"its {key} is {header.said(key)}, but it has {tokens.elements} tokens")
