"""Command-line options made from the fields that the contract declares for requests."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click
from google.protobuf.descriptor import FieldDescriptor

from quire.v1 import gateway_pb2
from services.cli.options import together
from services.wire.field_rules import DeclaredField, FieldPath, field_paths

_BITS = {FieldDescriptor.TYPE_INT32: 31, FieldDescriptor.TYPE_INT64: 63}
_TYPES = {*_BITS, FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_BOOL}
# One answer is printed, as text; `--beams` and the limit of tokens are options of their own.
_WITHOUT = ("sampling.sample_count", "beam_search.width", "stopping.max_tokens", "stopping.include_stop")
_PARTS = ("sampling.", "logit_rules.", "beam_search.", "stopping.")


def _option_paths() -> Iterator[FieldPath]:
    for path in field_paths(gateway_pb2.GenerateRequest.DESCRIPTOR):
        has_option = path.field.descriptor.type in _TYPES and not path.field.descriptor.is_repeated
        if has_option and path.text.startswith(_PARTS) and path.text not in _WITHOUT:
            yield path


class FieldNumber(click.ParamType[float]):
    """A number that the rules of a field permit."""

    def __init__(self, field: DeclaredField) -> None:
        """Take the bounds from the field."""
        self.name = "float" if field.is_fraction else "integer"
        self._field = field

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        """Raise click.BadParameter with the bounds and the value."""
        bits = _BITS.get(self._field.value_type)
        try:
            number = int(value) if bits else float(value)
        except ValueError:
            self.fail(f"must be {'an integer' if bits else 'a number'}, not {value}", parameter, context)
        if not self._field.holds(number):
            self.fail(f"must be {self._field.bounds()}, not {value}", parameter, context)
        if bits and not -(1 << bits) <= number < 1 << bits:
            self.fail(f"must be an integer of {bits + 1} bits, not {value}", parameter, context)
        return number


_OPTIONS = {path.field.name: path for path in _option_paths()}
_SEARCH = "beam_search."


def request_options() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add an option for each number and each switch that chooses tokens or ends the answer."""
    return together(*(_option(path) for path in _OPTIONS.values()))


def set_request_options(request: gateway_pb2.GenerateRequest, options: Mapping[str, Any]) -> None:
    """Set the fields of a request whose options are given."""
    for name, path in _OPTIONS.items():
        if options.get(name) is not None:
            path.set(request, options[name])


def search_options(options: Mapping[str, Any]) -> list[str]:
    """Return the given options that need a beam search."""
    needed = [name for name, path in _OPTIONS.items() if path.text.startswith(_SEARCH)]
    return [f"--{name.replace('_', '-')}" for name in needed if options[name] is not None]


def _option(path: FieldPath) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    field = path.field
    name = f"--{field.name.replace('_', '-')}"
    text = f"With --beams: {field.described()}" if path.text.startswith(_SEARCH) else field.described()
    if field.descriptor.type == FieldDescriptor.TYPE_BOOL:
        return click.option(name, is_flag=True, default=None, help=text)
    return click.option(name, type=FieldNumber(field), help=text)
