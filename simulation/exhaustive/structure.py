"""The structure of what objects reach, written as text: equal texts of two processes mean equal futures."""

import enum
import functools
import itertools
import queue
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from google.protobuf.message import Message

from simulation.exhaustive.left_out import LEFT_OUT, LEFT_OUT_ATTRIBUTES

_DIGEST_BYTES = 16
_UNSET = object()
_BY_IDENTITY: Any = object.__hash__
_NO_ATTRIBUTES: Mapping[str, Any] = {}

Writer = Callable[["Structure", Any], None]


class _Plan(NamedTuple):
    """What is written of the objects of a class."""

    name: str
    slots: tuple[str, ...]
    left_out: frozenset[str]


class Structure:
    """Writes objects and all that they reach, in the order of the visit.

    An object that was written before is written as its number, so that cycles end, and so that two references to one
    object differ from references to two equal ones. Values without identity of their own (numbers, texts, tuples,
    bound methods) are written each time.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._numbers: dict[int, int] = {}  # of written objects, by id
        self._kept: list[object] = []  # what was written, so that no id is used twice

    def digest(self) -> bytes:
        """Return a digest, 16 bytes, of what was written."""
        return blake2b(self.text().encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()

    def text(self) -> str:
        """Return what was written."""
        return "\n".join(self._parts)

    def put(self, text: str) -> None:
        """Write a text."""
        self._parts.append(text)

    def add(self, value: Any) -> None:
        """Write a value. Raises TypeError if its type may hide state that this class cannot read."""
        kind = type(value)
        if kind in _ATOMS:
            self._parts.append(repr(value))
            return
        writer = _WRITERS.get(kind)
        if writer is None:
            writer = _WRITERS[kind] = _writer_of(kind)
        writer(self, value)

    def add_all(self, values: Iterable[Any]) -> None:
        """Write values in order."""
        for value in values:
            self.add(value)

    def begins(self, value: object, name: str) -> bool:
        """Write the begin of an object, or its number if it was written before; return whether it was not."""
        numbers = self._numbers
        number = numbers.setdefault(id(value), len(numbers))
        if number < len(self._kept):
            self._parts.append(f"#{number}")
            return False
        self._kept.append(value)
        self._parts.append(name)
        return True

    def number_of(self, value: object) -> int | None:
        """Return the number of an object that was written."""
        return self._numbers.get(id(value))


def digest_of(value: Any) -> bytes:
    """Return the digest of a value's structure."""
    structure = Structure()
    structure.add(value)
    return structure.digest()


def register(writer: Writer, *kinds: type) -> None:
    """Write the objects of these classes by this function."""
    _WRITERS.update(dict.fromkeys(kinds, writer))


def register_names(writer: Writer, *names: str) -> None:
    """Write the objects of built-in classes with these names by this function."""
    _BY_NAME.update(dict.fromkeys(names, writer))


def _writer_of(kind: type) -> Writer:
    if issubclass(kind, tuple(LEFT_OUT)):
        return _ignore
    found = next((writer for base, writer in _BASES if issubclass(kind, base)), None)
    if found is not None:
        return found
    if kind.__module__ in ("builtins", "_asyncio", "_thread", "itertools"):
        if kind.__name__ in _BY_NAME:
            return _BY_NAME[kind.__name__]
        raise TypeError(f"the structure of a {kind.__qualname__} cannot be written")
    return _object_writer(kind)


def _ignore(structure: Structure, value: object) -> None:
    structure.put(type(value).__name__)


def _atom(structure: Structure, value: object) -> None:
    structure.put(repr(value))


def _name(structure: Structure, value: Any) -> None:
    structure.put(f"{value.__module__}.{value.__qualname__}")


def _enum(structure: Structure, value: enum.Enum) -> None:
    structure.put(f"{type(value).__name__}.{value.name}")


def _tuple(structure: Structure, value: tuple[Any, ...]) -> None:
    structure.put(f"{type(value).__name__}({len(value)}")
    structure.add_all(value)


def _sequence(structure: Structure, value: "list[Any] | deque[Any]") -> None:
    if structure.begins(value, f"{type(value).__name__}[{len(value)}"):
        structure.add_all(value)


def _mapping(structure: Structure, value: Mapping[Any, Any]) -> None:
    if structure.begins(value, f"{type(value).__name__}{{{len(value)}"):
        for key, item in value.items():
            structure.add(key)
            structure.add(item)


def _set(structure: Structure, value: "set[Any] | frozenset[Any]") -> None:
    """Write a set. Its members are values, or objects that were written before, such as the tasks of a loop."""
    if structure.begins(value, f"{type(value).__name__}{{{len(value)}"):
        structure.add_all(sorted(_member(structure, one) for one in value))


def _member(structure: Structure, value: Any) -> str:
    number = structure.number_of(value)
    if number is not None:
        return f"#{number}"
    if type(value).__hash__ is _BY_IDENTITY:
        raise TypeError(f"a set has a {type(value).__qualname__} that nothing else refers to")
    alone = Structure()
    alone.add(value)
    return alone.text()


def _array(structure: Structure, value: "array[Any]") -> None:
    if structure.begins(value, f"array {value.typecode}"):
        structure.put(value.tobytes().hex())


def _bytes(structure: Structure, value: bytes | bytearray | memoryview) -> None:
    structure.put(bytes(value).hex())


def _tensor(structure: Structure, value: torch.Tensor) -> None:
    if structure.begins(value, f"tensor {tuple(value.shape)}"):
        structure.put(repr(value.tolist()))


def _message(structure: Structure, value: Message) -> None:
    if structure.begins(value, type(value).__name__):
        structure.put(value.SerializeToString(deterministic=True).hex())


def _function(structure: Structure, value: types.FunctionType) -> None:
    structure.put(f"function {value.__module__}.{value.__qualname__}")
    structure.add_all(value.__closure__ or ())
    structure.add_all(value.__defaults__ or ())


def _cell(structure: Structure, value: types.CellType) -> None:
    if structure.begins(value, "cell"):
        try:
            structure.add(value.cell_contents)
        except ValueError:
            structure.put("empty")


def _method(structure: Structure, value: types.MethodType) -> None:
    structure.put(f"method {value.__func__.__qualname__}")
    structure.add(value.__self__)


def _builtin(structure: Structure, value: types.BuiltinFunctionType) -> None:
    structure.put(f"builtin {value.__qualname__}")
    if not isinstance(value.__self__, types.ModuleType | type | None):
        structure.add(value.__self__)


def _descriptor(structure: Structure, value: types.MethodDescriptorType) -> None:
    structure.put(f"method {value.__qualname__}")


def _partial(structure: Structure, value: "functools.partial[Any]") -> None:
    if structure.begins(value, "partial"):
        structure.add_all((value.func, value.args, value.keywords))


def _commands(structure: Structure, value: "queue.SimpleQueue[Any]") -> None:
    """Write what is queued, by taking it out and putting it back."""
    items = [value.get_nowait() for _ in range(value.qsize())]
    for item in items:
        value.put(item)
    if structure.begins(value, f"queue {len(items)}"):
        structure.add_all(items)


def _error(structure: Structure, value: BaseException) -> None:
    if structure.begins(value, type(value).__qualname__):
        structure.add(value.args)
        structure.add_all(vars(value).values())


def _object_writer(kind: type) -> Writer:
    """Return a function that writes the attributes of the objects of a class."""
    name, slots, left_out = _plan(kind)

    def write(structure: Structure, value: Any) -> None:
        if structure.begins(value, name):
            attributes = getattr(value, "__dict__", _NO_ATTRIBUTES)
            structure.put(",".join(attributes))
            structure.add_all(getattr(value, slot, _UNSET) for slot in slots)
            structure.add_all(item for name, item in attributes.items() if name not in left_out)

    return write


def _plan(kind: type) -> _Plan:
    slots: list[str] = []
    left_out: set[str] = set()
    for base in kind.__mro__:
        named = vars(base).get("__slots__", ())
        slots += (named,) if isinstance(named, str) else named
        left_out |= LEFT_OUT_ATTRIBUTES.get(base, frozenset())
    written = tuple(name for name in slots if name not in ("__dict__", "__weakref__") and name not in left_out)
    return _Plan(kind.__qualname__, written, frozenset(left_out))


_ATOMS = frozenset((type(None), bool, int, float, str))
_WRITERS: dict[type, Writer] = dict.fromkeys((type(Ellipsis), object, types.ModuleType, types.CodeType), _ignore)

_BY_NAME: dict[str, Writer] = {}

# In this order, because a class may have several of these bases.
_BASES: list[tuple[type | types.UnionType, Writer]] = [
    (enum.Enum, _enum),
    (type, _name),
    (str | int | float | range | itertools.count, _atom),
    (tuple, _tuple),
    (list | deque, _sequence),
    (dict | types.MappingProxyType, _mapping),
    (set | frozenset, _set),
    (array, _array),
    (bytes | bytearray | memoryview, _bytes),
    (torch.Tensor, _tensor),
    (Message, _message),
    (types.FunctionType, _function),
    (types.CellType, _cell),
    (types.MethodType, _method),
    (types.BuiltinFunctionType, _builtin),
    (types.MethodDescriptorType, _descriptor),
    (functools.partial, _partial),
    (queue.SimpleQueue, _commands),
    (BaseException, _error),
]
