"""Declarations of matrices of integers, of which each module has its layout. It imports no torch."""

from collections.abc import Callable, Collection, Mapping

from engine.errors import ModelUnsupported
from engine.native.formats.quantized.integer_groups import IntegerCodes, IntegerParts
from engine.native.formats.quantized.integers.layouts import Layout, Rules
from engine.native.formats.quantized.scheme import Coded, Matrices, by_module, check_complete
from engine.native.formats.tensors import TypedTensor

NEEDED = ("qweight", "qzeros", "scales")
# Makes the parts of a module's matrix from its stored tensors, by suffix.
PartsOf = Callable[[str, Mapping[str, TypedTensor], Layout], IntegerParts]


class IntegerScheme:
    """A declaration of matrices in parts `qweight`, `qzeros` and `scales`."""

    def __init__(self, method: str, rules: Rules, parts_of: PartsOf, others: Collection[str] = ()) -> None:
        """`others` are the suffixes of parts that may be missing."""
        self._rules = rules
        self._parts_of = parts_of
        self._suffixes = (*NEEDED, *others)
        self.label = f"{method} {rules.label}"

    def matrices(self, stored: Mapping[str, TypedTensor]) -> Matrices:
        """Return the quantized matrices among all tensors of a folder; only shapes and types of tensors are read.

        Raises ModelUnsupported, naming the tensor, if a part is missing, or has a shape or type that does not fit.
        """
        found = by_module(stored, self._suffixes)
        modules = {module: parts for module, parts in found.items() if parts.keys() != {"scales"}}
        coded: dict[str, Coded] = {}
        for module, layout in self._rules.layouts(modules).items():
            parts = modules[module]
            dense = check_complete(module, parts, NEEDED, stored)
            if layout is None:
                raise ModelUnsupported(f"its tensor {parts['qweight']} is quantized, but its quantization excludes it")
            tensors = {suffix: stored[name] for suffix, name in parts.items()}
            coded[dense] = Coded(IntegerCodes(self._parts_of(module, tensors, layout)))
        return Matrices(coded, frozenset(name for parts in modules.values() for name in parts.values()))
