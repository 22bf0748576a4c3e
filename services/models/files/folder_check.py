"""Checks a model's files before any process starts: without torch, without reading weights, within a second.

What is refused here is refused by file and field. Whether a model of sound files can be served is only known when it is
loaded.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.errors import ModelUnsupported
from engine.native.formats.gguf.header import gguf_of
from engine.native.formats.quantized.declared import declaring_file
from engine.native.formats.quantized.methods import file_with_own_name, matrices_of, scheme_of
from engine.native.formats.safetensors_files import INDEX, ONE_FILE, are_named, placements
from services.models.files.bounded_json import (
    MOST_TOKENIZER_BYTES,
    InvalidModelFile,
    read_configuration,
    read_object,
)
from services.models.files.chat_templates import read_templates
from services.models.files.declared_names import name_fault
from services.models.files.declared_types import declared_schema
from services.models.files.relations import EXPERTS, check_ends, check_relations
from services.models.files.schemas import (
    AdapterConfig,
    GenerationConfig,
    ModelConfig,
    TokenizerFile,
    check_schema,
)
from services.models.files.template_language import InvalidTemplate
from services.models.files.tensor_headers import Shape, TensorHeader, tensor_headers
from services.models.gguf.file_check import check_gguf
from services.models.tokenizer_settings import tokenizer_settings

__all__ = ["check_configuration", "check_entries", "check_folder", "check_gguf", "check_tokenizer", "gguf_of"]

CONFIG, GENERATION = "config.json", "generation_config.json"
_ADAPTER = "adapter_config.json"
_TOKENIZER = "tokenizer.json"
# Files that transformers converts to a tokenizer.
_OLDER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
# Files that are read of a folder, and handed to gateways.
_READ = (".json", ".jinja", ".safetensors", ".model", ".txt")
# A folder, with named chat templates.
_TEMPLATES = "additional_chat_templates"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_WIDTHS = (
    *("vocab_size", "hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_dim", "n_inner", "head_dim"),
    *("num_attention_heads", "n_head", "num_key_value_heads", "moe_intermediate_size"),
)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Of model types that run their layers several times, and count each time as one: how many layers have weights.
_LAYERS_WITH_WEIGHTS = {"hrm_text": ("num_layers_per_stack",)}
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
# Of model types that have tokens without text: rows of the embeddings beyond the vocabulary.
_MORE_ROWS = {"moshi": 1}
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.(\d+)\.")


def check_folder(folder: Path) -> None:
    """Check all files that are read of a folder: configurations, tokenizer, the headers of weights.

    Raises InvalidModelFile: one sentence with the file, the place and the reason.
    """
    check_entries(folder)
    config = check_configuration(folder)
    check_tokenizer(folder)
    _check_weights(folder, config)


def check_configuration(folder: Path) -> dict[str, Any]:
    """Return the content of `config.json`; its numbers and those of `generation_config.json` are within bounds.

    Raises InvalidModelFile.
    """
    if not (folder / CONFIG).is_file() and (folder / _ADAPTER).is_file():
        _refuse_adapter(folder / _ADAPTER)
    config = read_configuration(folder / CONFIG)
    check_schema(CONFIG, ModelConfig, config)
    if not config.get("model_type"):
        raise InvalidModelFile(f"{CONFIG}: model_type is missing (the name of the architecture in transformers)")
    if schema := declared_schema(config):
        check_schema(CONFIG, schema, config)
    if fault := _quantization_fault(folder):
        raise InvalidModelFile(f"{declaring_file(folder)}: {fault}")
    if fault := name_fault(config):
        raise InvalidModelFile(f"{CONFIG}: {fault}")
    for part in (config, config.get("text_config") or {}):
        check_relations(CONFIG, part)
    if (folder / GENERATION).is_file():
        _check_generation(folder / GENERATION, config)
    return config


def _quantization_fault(folder: Path) -> str:
    try:
        scheme_of(folder)
    except ModelUnsupported as error:
        return str(error)
    return ""


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder has a tokenizer of any form: engines need none, gateways do."""
    return any((folder / name).is_file() for name in (_TOKENIZER, *_OLDER_TOKENIZERS))


def check_tokenizer(folder: Path) -> None:
    """Check that a folder's tokenizer, its settings and chat templates can be parsed. Raises InvalidModelFile."""
    if (folder / _TOKENIZER).is_file():
        check_schema(_TOKENIZER, TokenizerFile, read_object(folder / _TOKENIZER, MOST_TOKENIZER_BYTES))
    elif not has_tokenizer(folder):
        raise InvalidModelFile(
            f"{_TOKENIZER} is missing, and so is any older tokenizer: {', '.join(_OLDER_TOKENIZERS)}"
        )
    try:
        read_templates(folder, tokenizer_settings(folder).get("chat_template")).check()
    except InvalidTemplate as error:
        raise InvalidModelFile(str(error)) from error


def check_entries(folder: Path) -> None:
    """Check that all that is read are files, none a link out of the folder. Raises InvalidModelFile with its name.

    A pipe or a device could be read for ever, and a folder would be passed over as if the file were missing.

    A snapshot of the hub's cache links to files in a folder of the same model. A GGUF file may lie anywhere: its folder
    in Quire's cache links to it.
    """
    folder = folder.resolve()
    inside = [folder, (folder.parent.parent / "blobs").resolve()] if folder.parent.name == "snapshots" else [folder]
    for path in (*sorted(folder.iterdir()), *sorted(folder.glob(f"{_TEMPLATES}/*"))):
        name = path.relative_to(folder)
        if path.name != _TEMPLATES and not path.name.lower().endswith(_READ):
            continue
        try:
            target = path.resolve()
        except (OSError, RuntimeError) as error:
            raise InvalidModelFile(f"{name} is a link that leads back to itself") from error
        if path.is_symlink() and not any(target.is_relative_to(one) for one in inside):
            raise InvalidModelFile(f"{name} is a link out of the model's folder, to {target}")
        if path.name != _TEMPLATES and target.exists() and not target.is_file():
            raise InvalidModelFile(f"{name} is no regular file")


def _check_generation(path: Path, config: Mapping[str, Any]) -> None:
    generation = read_configuration(path)
    check_schema(path.name, GenerationConfig, generation)
    text = config.get("text_config") or {}
    check_ends(path.name, generation, text.get("vocab_size") or config.get("vocab_size"))


def _refuse_adapter(path: Path) -> None:
    adapter = read_configuration(path)
    check_schema(path.name, AdapterConfig, adapter)
    base = adapter.get("base_model_name_or_path") or "another model"
    raise InvalidModelFile(
        f"{path.name}: the folder has an adapter of {base}, which is not served: merge it into its model"
    )


# Weights


def _check_weights(folder: Path, config: Mapping[str, Any]) -> None:
    try:
        if gguf := gguf_of(folder):
            check_gguf(gguf)
        elif are_named(folder) or file_with_own_name(folder):
            _check_sizes({**config, **(config.get("text_config") or {})}, _dense_shapes(folder, _headers(folder)))
        else:
            raise InvalidModelFile(_without_weights(folder))
    except ModelUnsupported as error:
        raise InvalidModelFile(str(error)) from error


def _dense_shapes(folder: Path, headers: Mapping[str, TensorHeader]) -> dict[str, Shape]:
    """Return the shapes of all tensors, of quantized matrices those of their values. Raises ModelUnsupported."""
    matrices = matrices_of(scheme_of(folder), headers)
    plain = {name: header.shape for name, header in headers.items() if name not in matrices.parts}
    return plain | {name: one.codes.shape for name, one in matrices.coded.items()}


def _headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the headers of all tensors. Raises InvalidModelFile, and ModelUnsupported for a wrong index."""
    if not are_named(folder) and (file := file_with_own_name(folder)):
        return tensor_headers(file)
    if (folder / ONE_FILE).is_file():
        return tensor_headers(folder / ONE_FILE)
    read_object(folder / INDEX, MOST_TOKENIZER_BYTES)  # bounded, unlike what follows
    placed = placements(folder)
    headers = {name: tensor_headers(folder / name) for name in sorted(set(placed.values()))}
    for tensor, name in placed.items():
        if tensor not in headers[name]:
            raise InvalidModelFile(f"{INDEX} places tensor {tensor} in {name}, which lacks it")
    return {tensor: headers[name][tensor] for tensor, name in placed.items()}


def _without_weights(folder: Path) -> str:
    pickles = sorted(path.name for path in folder.iterdir() if path.name.lower().endswith(_PICKLES))
    if pickles:
        return (
            f"{pickles[0]} is a pickle, which may run any code when it is read, and the folder has no other weights: "
            "convert them to safetensors"
        )
    return f"{ONE_FILE} is missing, and so is {INDEX} or a .gguf file"


def _check_sizes(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> None:
    """Raise InvalidModelFile if a configuration declares sizes that its tensors cannot have.

    transformers makes modules of these sizes before it compares them.
    """
    longest = max((size for shape in shapes.values() for size in shape), default=0)
    for name, size in _numbers(config, _WIDTHS):
        if size > longest:
            raise InvalidModelFile(
                f"{CONFIG}: {name} is {size}, but no dimension of its tensors is longer than {longest}"
            )
    for name, count in _numbers(config, EXPERTS):
        if count > max(longest, len(shapes)):
            raise InvalidModelFile(f"{CONFIG}: {name} is {count}, but its files have {len(shapes)} tensors")
    _check_vocabulary(config, shapes)
    _check_layers(config, shapes)


def _check_vocabulary(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> None:
    size, more = config.get("vocab_size"), _MORE_ROWS.get(config.get("model_type", ""), 0)
    embeddings = {name: shape for name, shape in shapes.items() if name.endswith(_EMBEDDINGS)}
    if size and embeddings and not any(size + more in shape for shape in embeddings.values()):
        name, shape = next(iter(embeddings.items()))
        raise InvalidModelFile(f"{CONFIG}: vocab_size is {size}, but tensor {name} has shape {list(shape)}")


def _check_layers(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> None:
    count = 1 + max((int(match[1]) for tensor in shapes if (match := _LAYER.search(tensor))), default=-1)
    own = _LAYERS_WITH_WEIGHTS.get(config.get("model_type", ""), ())
    for name, layers in _numbers(config, own if any(map(config.get, own)) else _LAYERS):
        if count and layers > count:
            raise InvalidModelFile(f"{CONFIG}: {name} is {layers}, but its files have tensors of {count} layers")


def _numbers(config: Mapping[str, Any], names: Iterable[str]) -> Iterable[tuple[str, int]]:
    return ((name, size) for name in names if isinstance(size := config.get(name), int))
