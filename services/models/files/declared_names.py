"""Values of a `config.json` that must be among the names that transformers' source code has.

Activations, rotations and types of layers are looked up by their names when a model is made: an unknown one would only
be a missing key. A name in the source of a model type's configuration is taken too, since that may replace it.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from services.models.files.declared_types import DeclaredClass, declared_class, declares, transformers_folder
from services.runtime.http.validation import shown

_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_ROTATIONS = ("rope_parameters", "rope_scaling")
_LAYER_TYPES = ("ALLOWED_ATTN_LAYER_TYPES", "_LEGACY_LAYER_TYPE_REMAP")
_MODEL_TYPES = Path("models", "auto", "configuration_auto.py")


def name_fault(config: Mapping[str, Any]) -> str:
    """Return the fault of the first name that transformers does not know, by its field; empty if there is none."""
    text = config.get("text_config") or {}
    if _unknown_type(config["model_type"]):
        return f"model_type is {shown(config['model_type'])}, which this version of transformers does not know"
    for prefix, part in (("", config), ("text_config.", text)):
        declared = declared_class(part.get("model_type") or config["model_type"])
        if declared and (fault := _fault(part, declared)):
            return f"{prefix}{fault}"
    return ""


def _unknown_type(name: str) -> bool:
    root = transformers_folder()
    listed = _source(root / _MODEL_TYPES) if root and declared_class("llama") else ""
    return bool(listed) and declared_class(name) is None and f'"{name}"' not in listed


def _fault(config: Mapping[str, Any], declared: DeclaredClass) -> str:
    for field, name, known in _named(config, declared):
        if known and name not in known and f'"{name}"' not in _source(declared.file):
            return f"{field} must be one of {', '.join(known)}, not {shown(name)}"
    return _layers_fault(config, declared)


def _named(config: Mapping[str, Any], declared: DeclaredClass) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield the path of each field with a name, the name, and the names that are known."""
    for field in _ACTIVATIONS:
        if declares(declared, field) and config.get(field) is not None:
            yield field, config[field], _names("activations.py", "ACT2CLS")
    for field in _ROTATIONS if declares(declared, "rope_parameters") else ():
        for path, rotation in _rotations(field, config.get(field) or {}):
            for key in ("rope_type", "type"):
                if rotation.get(key) is not None:
                    known = _names("modeling_rope_utils.py", "ROPE_INIT_FUNCTIONS")
                    yield f"{path}.{key}", rotation[key], known and ("default", *known)
    for at, kind in enumerate(config.get("layer_types") or ()):
        known = _names("configuration_utils.py", "ALLOWED_ATTN_LAYER_TYPES")
        yield (
            f"layer_types[{at}]",
            kind,
            known and (*known, *_names("configuration_utils.py", "_LEGACY_LAYER_TYPE_REMAP")),
        )


def _rotations(path: str, rotation: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Return the rotation of all layers, or those of each type of layers, by their paths."""
    by_type = {key: one for key, one in rotation.items() if isinstance(one, dict)}
    return [(f"{path}.{key}", one) for key, one in by_type.items()] or [(path, rotation)]


def _layers_fault(config: Mapping[str, Any], declared: DeclaredClass) -> str:
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if kinds is None or layers is None or len(kinds) == layers:
        return ""
    if not declares(declared, "num_hidden_layers") or "self.num_hidden_layers =" in _source(declared.file):
        return ""
    return f"layer_types has {len(kinds)} entries, but num_hidden_layers is {layers}"


@cache
def _names(file: str, variable: str) -> tuple[str, ...]:
    """Return the strings of a tuple, or the keys of a mapping, in transformers' source; empty if it is not found."""
    root = transformers_folder()
    for one in ast.parse(_source(root / file)).body if root else ():
        match one:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=value)
            ) if name == variable:
                members = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", [])
                return tuple(str(key.value) for key in members if isinstance(key, ast.Constant))
    return ()


@cache
def _source(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
