"""The groups of a compressed-tensors declaration: how weights are stored, and which modules they are for. No torch.

Fields and their defaults are those of compressed-tensors 0.20.1, `quantization/quant_args.py`; the precedence of
targets is that of `utils/match.py`.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.errors import ModelUnsupported
from engine.native.formats.quantized.fields import flag, integer, matches, names, seconds_of_each, shown
from engine.native.formats.quantized.scheme import HELP

FORMATS = (
    *("pack-quantized", "int-quantized", "naive-quantized", "float-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
_PACKED_BITS = (4, 8)
_DENSE_BITS = 16  # of activations that are not quantized
_STRATEGIES = {"int": ("tensor", "channel", "group"), "float": ("tensor", "channel", "group", "block")}
_ORDERED = ("group", "dynamic", "true")  # of actorder; with others, weights are stored in the order of inputs
_PATTERN = "re:"
_SIDE = re.compile("[1-9][0-9]{0,8}")
_MOST_COMPARISONS = 2_000_000  # of patterns with modules
# Prefixes of a text model's modules in image-text checkpoints, whose declarations name them with it.
_TEXT_PARTS = ("language_model", "model.language_model")


class Weights(NamedTuple):
    """How the weights of a group are stored.

    `kind` is int or float. A scale is for `block` outputs and inputs if that is set, else for `size` inputs, else for
    an output or for all. `activations` are the bits of activations; 16 if they are not quantized. `ordered` says that
    the inputs of a group do not follow each other.
    """

    kind: str
    bits: int
    symmetric: bool
    size: int | None
    block: tuple[int, int] | None
    activations: int
    ordered: bool = False

    @property
    def label(self) -> str:
        """The format in a few words."""
        if self.kind == "int":
            group = f" g{self.size}{' act-order' if self.ordered else ''}" if self.size else ""
            return f"w{self.bits}a{self.activations}{group}"
        if self.bits == 4:
            return "nvfp4" if self.size == 16 else "mxfp4"
        if self.size == 32:
            return "mxfp8"
        block = f" {self.block[0]}x{self.block[1]}" if self.block else ""
        return f"fp8{block}" + (f" g{self.size}" if self.size else "")


def refused(what: str, helps: str = HELP) -> ModelUnsupported:
    """Return the error for what is declared, but not served."""
    return ModelUnsupported(f"its weights are quantized (compressed-tensors, {what}), which is not served: {helps}")


def weights_by_target(fields: Mapping[str, Any]) -> dict[str, Weights]:
    """Return the weights that a declaration has for each target. Raises ModelUnsupported, naming the field."""
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelUnsupported("its quantization has no config_groups")
    found: dict[str, Weights] = {}
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise ModelUnsupported(f"its quantization has config_groups.{name}, which is no group of weights")
        if (weights := _weights(str(name), group, str(group.get("format") or fields.get("format")))) is not None:
            found |= dict.fromkeys(names(group, "targets"), weights)
    if not found:
        raise ModelUnsupported("its quantization has config_groups without weights")
    return found


def _weights(name: str, group: Mapping[str, Any], form: str) -> Weights | None:
    """Return the weights of a group; None if it is of activations only."""
    fields = group.get("weights")
    if fields is None:
        return None
    if not isinstance(fields, dict):
        raise ModelUnsupported(f"its quantization has config_groups.{name}.weights, which are no fields")
    if form not in (*FORMATS, "mixed-precision", "None"):
        raise refused(f"format {form}")
    kind, bits = str(fields.get("type") or "int").lower(), integer(fields, "num_bits", 8)
    _check_bits(kind, bits, form)
    size = fields.get("group_size")
    size = None if size in (None, -1) else integer(fields, "group_size")
    strategy = str(fields.get("strategy") or ("group" if size else "channel")).lower()
    found = Weights(
        kind,
        bits,
        flag(fields, "symmetric", default=True),
        size if strategy in ("group", "tensor_group") else None,
        _block(fields) if strategy == "block" else None,
        _activations(group),
        str(fields.get("actorder")).lower() in _ORDERED,
    )
    _check(found, strategy)
    return found


def _check_bits(kind: str, bits: int, form: str) -> None:
    if kind == "int" and form == "pack-quantized" and bits not in _PACKED_BITS:
        raise refused(f"{bits} bits in {form}", "integers must have 4 or 8 bits; a GGUF file may have others")
    served = range(2, 9) if kind == "int" else (4, 8) if kind == "float" else ()
    if bits not in served:
        raise refused(f"{kind} of {bits} bits")


def _check(weights: Weights, strategy: str) -> None:
    kind, bits, size = weights.kind, weights.bits, weights.size
    if kind == "float" and not weights.symmetric:
        raise refused("asymmetric float")
    if strategy in ("group", "tensor_group") and (size is None or size < 1):
        raise refused(f"strategy {strategy} with group_size {size}")
    if kind == "float" and bits == 4:
        if (strategy, size) not in (("tensor_group", 16), ("group", 32)):
            raise refused(f"float of 4 bits with strategy {strategy} and group_size {size}")
    elif strategy not in _STRATEGIES[kind]:
        raise refused(f"{kind} of {bits} bits with strategy {strategy}")


def _block(fields: Mapping[str, Any]) -> tuple[int, int]:
    declared = fields.get("block_structure")
    sides = declared.split("x") if isinstance(declared, str) else declared
    if isinstance(sides, list) and len(sides) == 2 and all(_SIDE.fullmatch(str(one)) for one in sides):
        return int(sides[0]), int(sides[1])
    raise refused(f"block_structure {shown(declared)}")


def _activations(group: Mapping[str, Any]) -> int:
    fields = group.get("input_activations")
    bits = integer(fields, "num_bits", 8) if isinstance(fields, dict) else _DENSE_BITS
    if not 0 < bits <= _DENSE_BITS:
        raise refused(f"input_activations of {shown(bits)} bits")
    return bits


class Targets:
    """Which weights a module has: names come before patterns, patterns before classes."""

    def __init__(self, weights: Mapping[str, Weights], ignored: tuple[str, ...]) -> None:
        """`weights` are by target, `ignored` are targets without weights."""
        self._named = dict(weights)
        self._patterns = _patterns(sorted(weights))
        self._prefixes = _TEXT_PARTS if any(_TEXT_PARTS[0] in target for target in weights) else ()
        self._seconds = seconds_of_each(1)
        self._ignored, self._ignored_patterns = frozenset(ignored), _patterns(ignored)

    def of(self, module: str) -> Weights | None:
        """Return the weights of a linear module or an embedding, None if no target is for it."""
        kind = "Embedding" if module.endswith("embed_tokens") else "Linear"
        for name in (module, *self._in_image_text(module)):
            if found := self._by_name(name):
                return found
        return self._named.get(kind)

    def check_count(self, modules: int) -> None:
        """Limit the time of each comparison. Raises ModelUnsupported if patterns times modules exceed the limit."""
        patterns = len(self._patterns) * (1 + 2 * len(self._prefixes)) + len(self._ignored_patterns)
        if patterns * modules > _MOST_COMPARISONS:
            raise ModelUnsupported(f"its quantization has too many patterns for {modules} modules: {patterns}")
        self._seconds = seconds_of_each(patterns * modules)

    def ignores(self, module: str) -> bool:
        """Return whether a module is declared as one without quantized weights."""
        return module in self._ignored or any(matches(one, module, self._seconds) for one in self._ignored_patterns)

    def _by_name(self, module: str) -> Weights | None:
        if found := self._named.get(module):
            return found
        pattern = next((one for one in self._patterns if matches(one, module, self._seconds)), None)
        return None if pattern is None else self._named[_PATTERN + pattern]

    def _in_image_text(self, module: str) -> list[str]:
        """Return the names that a text model's module may have in an image-text checkpoint."""
        short = module.removeprefix("model.")
        return [f"{part}.{name}" for part in self._prefixes for name in (module, short)]


def _patterns(targets: list[str] | tuple[str, ...]) -> list[str]:
    return [one.removeprefix(_PATTERN) for one in targets if one.startswith(_PATTERN)]
