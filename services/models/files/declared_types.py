"""The types that transformers declares for the fields of a `config.json`, read from its source code.

transformers checks each value against the annotation of its field, which differs by model type: an integer is no float,
and null is only for some. Its classes take seconds to import, so their annotations are parsed instead. What cannot be
parsed is not checked here: transformers refuses it when the model is loaded.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.machinery import PathFinder
from math import inf, isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union

from pydantic import AfterValidator, BeforeValidator, Field, create_model
from pydantic_core import PydanticCustomError

from services.models.files.config_schema import ModelConfig
from services.models.files.numbers import FileSchema, said
from services.runtime.http.validation import EXPECTED

_TYPES_FILE = Path("models", "auto", "auto_mappings.py")
_PARTS, _OTHER_NAMES = "sub_configs_defaults", "attribute_map"
_UNREAD = (*("model_type", "transformers_version"), _PARTS, _OTHER_NAMES)  # checked elsewhere, or of the class


class DeclaredClass(NamedTuple):
    """A configuration class of transformers: the file and its name."""

    file: Path
    name: str


class _Part(NamedTuple):
    """A class and those of the parts that a configuration has, by their keys."""

    declared: DeclaredClass
    parts: tuple[tuple[str, "_Part"], ...]


def declared_class(model_type: str) -> DeclaredClass | None:
    """Return the configuration class of a model type; None if transformers' source is not found or has none."""
    root = transformers_folder()
    if root is None or not (names := _class_names(root)).get(model_type):
        return None
    folder = root / "models" / _module_names(root).get(model_type, model_type.replace("-", "_"))
    usual = folder / f"configuration_{folder.name}.py"
    files = (usual, *sorted(folder.glob("configuration_*.py")))
    return DeclaredClass(next((one for one in files if names[model_type] in _classes(one)), usual), names[model_type])


def declared_schema(config: Mapping[str, Any]) -> type[FileSchema] | None:
    """Return the schema of a configuration with its parts; None for an unknown model type."""
    declared = declared_class(config["model_type"])
    return _schema(_part(declared, config)) if declared and _fields(declared) else None


def declares(declared: DeclaredClass, field: str) -> bool:
    """Return whether a class has a field of this name."""
    return field in _fields(declared)


@cache
def transformers_folder() -> Path | None:
    """Return the folder of transformers' source, which is not imported."""
    found = PathFinder.find_spec("transformers")
    return Path(found.origin).parent if found and found.origin else None


# How transformers writes them.
_FLOAT = "__float__"
_NOT_FINITE = [{_FLOAT: name} for name in ("Infinity", "-Infinity", "NaN")]


def _integer_is_no_float(value: Any) -> Any:
    if value in _NOT_FINITE:
        return float(value[_FLOAT])
    if isinstance(value, int):
        raise PydanticCustomError(EXPECTED, "a number with a decimal point, such as 1.0")
    return value


_NOTHING = object()  # a type that no value of JSON has
_SIMPLE: dict[str, Any] = {
    "int": int,
    "float": Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_integer_is_no_float)],
    "bool": bool,
    "str": str,
    "list": list[Any],
    "dict": dict[str, Any],
    "tuple": _NOTHING,
}


def _type(node: ast.expr) -> Any:
    """Return the type of an annotation; Any for what is not known."""
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Name(id=name):
            return _SIMPLE.get(name, dict[str, Any] if name.endswith(("Config", "Parameters")) else Any)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _union(_type(left), _type(right))
        case ast.Subscript(value=ast.Name(id=name), slice=inner):
            return _parametrized(name, inner.elts if isinstance(inner, ast.Tuple) else [inner])
    return Any


def _parametrized(name: str, inner: list[ast.expr]) -> Any:
    match name:
        case "list":
            return list[_type(inner[0])]  # type: ignore[misc]
        case "dict" if _type(inner[0]) is int:  # keys of JSON are strings
            return _NOTHING
        case "dict":
            return dict[_type(inner[0]), _type(inner[1])]  # type: ignore[misc]
        case "tuple":
            return _NOTHING
        case "Optional":
            return _union(_type(inner[0]), None)
        case "Union":
            return _union(*map(_type, inner))
        case "Literal":
            return Literal[tuple(ast.literal_eval(one) for one in inner)]
    return Any


def _union(*members: Any) -> Any:
    known = tuple(one for one in members if one is not _NOTHING)
    return Union[known] if known else _NOTHING  # noqa: UP007 - of members that are known now only


@cache
def _fields(declared: DeclaredClass) -> dict[str, Any]:
    """Return the type of each field of a class and its bases, also under other names that it takes."""
    node = _classes(declared.file).get(declared.name)
    if node is None:
        return {}
    found = {name: kind for base in _bases(declared.file, node) for name, kind in _fields(base).items()}
    for one in node.body:
        match one:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation) if name not in _UNREAD:
                if "ClassVar" not in ast.dump(annotation):
                    found[name] = _bounded(_type(annotation), one.value)
    others = _value(node, _OTHER_NAMES)
    for other, name in ast.literal_eval(others).items() if isinstance(others, ast.Dict) else ():
        if name in found:
            found.setdefault(other, found[name])
    return found


def _bounded(kind: Any, default: ast.expr | None) -> Any:
    """Add the bounds of a field whose default is `interval(min=..., max=...)(default=...)`."""
    match default:
        case ast.Call(func=ast.Call(func=ast.Name(id="interval"), args=[], keywords=words)):
            bounds = {one.arg or "": ast.literal_eval(one.value) for one in words}
            return Annotated[kind, AfterValidator(_within(**bounds))]
    return kind


def _within(min: float = -inf, max: float = inf, exclude_min: bool = False, exclude_max: bool = False) -> Any:  # noqa: A002
    """Return a validator with the parameters of `interval` in transformers' utils/type_validators.py."""
    lower = f"{'above' if exclude_min else 'at least'} {min}"
    upper = f"{'below' if exclude_max else 'at most'} {max}"
    expected = " and ".join(text for text, bound in ((lower, min), (upper, max)) if isfinite(bound))

    def check(value: Any) -> Any:
        if not min <= value <= max or (exclude_min and value == min) or (exclude_max and value == max):
            raise PydanticCustomError(EXPECTED, expected)
        return value

    return check


# Classes


@cache
def _classes(file: Path) -> dict[str, ast.ClassDef]:
    """Return the classes of a file; none if its annotations stay text, which transformers does not check."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError):
        return {}
    if any(isinstance(one, ast.ImportFrom) and one.module == "__future__" for one in tree.body):
        return {}
    return {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}


def _bases(file: Path, node: ast.ClassDef) -> Iterator[DeclaredClass]:
    for base in node.bases:
        if not isinstance(base, ast.Name):
            continue
        if base.id in _classes(file):
            yield DeclaredClass(file, base.id)
        elif imported := re.search(rf"^from (\.+)([\w.]+) import .*\b{base.id}\b", file.read_text(), re.MULTILINE):
            folder = file.parents[len(imported[1]) - 1]
            yield DeclaredClass(folder.joinpath(*imported[2].split(".")).with_suffix(".py"), base.id)


def _value(node: ast.ClassDef, name: str) -> ast.expr | None:
    """Return what a class assigns to a name."""
    for one in node.body:
        match one:
            case ast.Assign(targets=[ast.Name(id=assigned)], value=value) if assigned == name:
                return value
    return None


def _part(declared: DeclaredClass, config: Mapping[str, Any]) -> _Part:
    node = _classes(declared.file).get(declared.name)
    defaults = _value(node, _PARTS) if node else None
    parts = []
    for key, spec in zip(defaults.keys, defaults.values, strict=True) if isinstance(defaults, ast.Dict) else ():
        name = str(ast.literal_eval(key)) if key else ""
        if isinstance(part := config.get(name), dict) and (found := _class_of_part(declared.file, spec, part)):
            parts.append((name, _part(found, part)))
    return _Part(declared, tuple(parts))


def _class_of_part(file: Path, spec: ast.expr, part: Mapping[str, Any]) -> DeclaredClass | None:
    """Return the class of a part: the one that is named, or of any type the one of the part's."""
    words = {one.arg: one.value for one in spec.keywords} if isinstance(spec, ast.Call) else {"config_class": spec}
    named, default = words.get("config_class"), words.get("model_type")
    if isinstance(named, ast.Name) and named.id in _classes(file):
        return DeclaredClass(file, named.id)
    if not isinstance(named, ast.Name) or named.id != "AutoConfig":
        return None
    kind = part.get("model_type") or (ast.literal_eval(default) if default else "")
    return declared_class(kind) if isinstance(kind, str) else None


@cache
def _schema(part: _Part) -> type[FileSchema]:
    fields = _fields(part.declared) | {key: _union(_schema(one), None) for key, one in part.parts}
    known = {name: kind for name, kind in fields.items() if kind is not _NOTHING}
    given: dict[str, Any] = {f"field_{at}": (known[name], said(_sentence(name), name)) for at, name in enumerate(known)}
    return create_model(part.declared.name, __base__=FileSchema, **given)


def _sentence(name: str) -> str:
    field = ModelConfig.model_fields.get(name)
    return (field.description if field else None) or ""


# Model types


@cache
def _class_names(root: Path) -> dict[str, str]:
    return _pairs(root, "CONFIG_MAPPING_NAMES")


@cache
def _module_names(root: Path) -> dict[str, str]:
    return _pairs(root, "SPECIAL_MODEL_TYPE_TO_MODULE_NAME")


def _pairs(root: Path, variable: str) -> dict[str, str]:
    """Return the pairs of a mapping in transformers' source: model types, and their classes or folders."""
    try:
        text = (root / _TYPES_FILE).read_text()
    except OSError:
        return {}
    block = re.search(rf"^{variable} = .*?^\)", text, re.MULTILINE | re.DOTALL)
    return dict(re.findall(r'\("([\w.-]+)", "(\w+)"\)', block[0])) if block else {}
