"""How the weights of each module are quantized, where a declaration has several ways. It imports no torch."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from engine.errors import ModelUnsupported
from engine.native.formats.quantized.fields import flag, integer, matches, seconds_of_each, shown

_MOST_COMPARISONS = 1_000_000  # of patterns with modules: of long lists each name is its own pattern


class Layout(NamedTuple):
    """The bits of a weight, and the inputs that have a scale and a zero in common; -1: all of them.

    `ordered` says that the inputs of a group do not follow each other.
    """

    bits: int
    group: int
    ordered: bool = False

    @property
    def declared(self) -> str:
        """The fields that shapes follow from, with their values."""
        return f"bits {self.bits} and group_size {self.group}"

    @property
    def label(self) -> str:
        """The layout in a few words, such as `int4 g128`."""
        group = f"g{self.group}" if self.group > 0 else "by output"
        return f"int{self.bits} {group}{' act-order' if self.ordered else ''}"


def layout_of(fields: Mapping[str, Any], allowed: Collection[int], default: Layout | None = None) -> Layout:
    """Return the layout of fields `bits`, `group_size` and `desc_act`, of which each may have a default.

    Raises ModelUnsupported, naming the field, for others than the allowed bits, and for no group.
    """
    bits = integer(fields, "bits", default.bits if default else None)
    if bits not in allowed:
        raise ModelUnsupported(f"its quantization has bits {shown(bits)}, not {' or '.join(map(str, allowed))}")
    group = integer(fields, "group_size", default.group if default else None)
    if group != -1 and group < 1:
        raise ModelUnsupported(f"its quantization has group_size {shown(group)}, which is neither -1 nor positive")
    return Layout(bits, group, flag(fields, "desc_act", default=bool(default and default.ordered)))


class Rule(NamedTuple):
    """The layout of modules whose names a pattern matches, None: they are not quantized."""

    pattern: str
    layout: Layout | None


class Rules:
    """Finds the layout of a module: the first rule that matches its name decides, else the default."""

    def __init__(self, default: Layout, rules: Sequence[Rule] = (), *, anywhere: bool = False) -> None:
        """Patterns match the start of a name, or a part of it if `anywhere`, where a name itself is no pattern."""
        self.default = default
        self._rules = rules
        self._anywhere = anywhere
        self._names = {rule.pattern: rule for rule in reversed(rules)} if anywhere else {}

    @property
    def label(self) -> str:
        """The layout in a few words, such as `int4 g128`."""
        others = {rule.layout for rule in self._rules} - {self.default, None}
        return f"{self.default.label} mixed" if others else self.default.label

    def layouts(self, modules: Collection[str]) -> dict[str, Layout | None]:
        """Return the layout of each module. Raises ModelUnsupported if a pattern is none, or takes too long."""
        named = set(modules) if self._anywhere else set()
        patterns = [rule for rule in self._rules if rule.pattern not in named]
        if len(patterns) * len(modules) > _MOST_COMPARISONS:
            raise ModelUnsupported(
                f"its quantization has {len(patterns)} patterns for {len(modules)} modules, which are too many"
            )
        seconds = seconds_of_each(len(patterns) * len(modules))
        return {module: self._rule_of(module, patterns, seconds).layout for module in modules}

    def _rule_of(self, module: str, patterns: Sequence[Rule], seconds: float) -> Rule:
        if named := self._names.get(module):
            return named
        found = (one for one in patterns if matches(one.pattern, module, seconds, anywhere=self._anywhere))
        return next(found, Rule("", self.default))
