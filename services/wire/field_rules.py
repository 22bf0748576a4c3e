"""Reads the rules that stand on the fields of requests in the protos, and checks and fills requests by them.

Gateways check clients' requests, and engines check gateways' submissions. The options of `quire generate`, the schemas
and names of the HTTP API, and tables of its pages are made from the same rules.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from quire.v1 import decoding_pb2, field_rules_pb2, gateway_pb2
from services.wire.duration import seconds_of

# Makes the error of a field from a sentence and the field's path.
Refusal = Callable[[str, str], Exception]
Number = bool | int | float

_FLOATS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_MESSAGES = {
    message.DESCRIPTOR.name: message.DESCRIPTOR
    for message in (gateway_pb2.OutputOptions, decoding_pb2.Sampling, decoding_pb2.LogitRules, decoding_pb2.Stopping)
}

# Fields of requests for which a model's generation_config.json may have a default.
_MODEL_DEFAULTS = frozenset(
    field.GetOptions().Extensions[field_rules_pb2.rules].same_as
    for field in decoding_pb2.GenerationDefaults.DESCRIPTOR.fields
)


class Fault(NamedTuple):
    """What is wrong with a field: the place in it, such as `[3]`, and how it breaks its rules."""

    place: str
    rule: str


class DeclaredField:
    """A field with its rules."""

    def __init__(self, descriptor: FieldDescriptor) -> None:
        """Read the rules from the field's options."""
        rules = descriptor.GetOptions().Extensions[field_rules_pb2.rules]
        if rules.same_as:
            owner, name = rules.same_as.split(".")
            rules = _MESSAGES[owner].fields_by_name[name].GetOptions().Extensions[field_rules_pb2.rules]
        kind = descriptor.message_type
        self.descriptor = descriptor
        self.rules = rules
        self.name = descriptor.name
        self.http_name = rules.http_name or descriptor.name
        self.is_map = kind is not None and kind.GetOptions().map_entry
        self.is_duration = kind is not None and kind.full_name == Duration.DESCRIPTOR.full_name
        self.value_type = kind.fields_by_name["value"].type if kind and self.is_map else descriptor.type
        self.is_fraction = self.value_type in _FLOATS
        self.default = self._default()
        message = descriptor.containing_type
        self.has_model_default = message is not None and f"{message.name}.{descriptor.name}" in _MODEL_DEFAULTS
        self._least = rules.min if rules.HasField("min") else -math.inf
        self._above = rules.above if rules.HasField("above") else -math.inf
        self._most = rules.max if rules.HasField("max") else math.inf

    @property
    def is_required(self) -> bool:
        """Whether an empty field breaks its rules, although a message cannot show whether it was given."""
        texts = self.rules.min_bytes and not self.descriptor.is_repeated and not self.descriptor.has_presence
        return bool(self.rules.min_entries or texts)

    def described(self) -> str:
        """Return its sentence with its bounds and its default."""
        bounds = "" if self.value_type in _TEXTS else self.bounds().removeprefix("a finite number").removeprefix(" of ")
        further = [bounds.strip().capitalize()] * bool(bounds)
        if self.default is not None:
            further.append(f"{'default' if further else 'Default'}: {self.described_default()}")
        return " ".join([self.rules.summary, *([f"{'; '.join(further)}."] if further else [])])

    def described_default(self) -> str:
        """Describe the value of the absent field; empty without one."""
        if self.default is None:
            return ""
        default = str(self.default).lower() if self.value_type == FieldDescriptor.TYPE_BOOL else shown(self.default)
        return f"the model's, else {default}" if self.has_model_default else default

    def bounds(self) -> str:
        """Describe the bounds of its numbers, such as `between 0 and 1`; empty without bounds."""
        rules = self.rules
        least, above, most = (
            shown(getattr(rules, name)) if rules.HasField(name) else "" for name in ("min", "above", "max")
        )
        if most and (above or least):
            return f"above {above} and at most {most}" if above else f"between {least} and {most}"
        if most:
            return f"at most {most}"
        if above or least:
            bound = f"above {above}" if above else f"at least {least}"
            return f"a finite number {'' if above else 'of '}{bound}" if self.is_fraction else bound
        return "a finite number" if self.is_fraction else ""

    def holds(self, number: float) -> bool:
        """Whether a number is finite and within the bounds."""
        return math.isfinite(number) and self._least <= number <= self._most and number > self._above

    def fault(self, value: Any) -> Fault | None:
        """Return what is wrong with a value of the field. No text of a request becomes part of it."""
        if self.is_map:
            return self._fault_of_map(value)
        if not self.descriptor.is_repeated:
            return self._fault_of_one(value)
        if fault := self._fault_of_size(len(value), "entries"):
            return fault
        if self.descriptor.type not in _TEXTS:
            return None  # token ids are checked with the vocabulary
        faults = ((at, self._fault_of_one(one)) for at, one in enumerate(value))
        return next((Fault(f"[{at}]", fault.rule) for at, fault in faults if fault), None)

    def clamped(self, number: float) -> float:
        """Return a number within the range in which numbers differ in effect."""
        rules = self.rules
        if rules.HasField("clamp_max"):
            number = min(number, rules.clamp_max)
        return max(number, rules.clamp_min) if rules.HasField("clamp_min") and number else number

    def _default(self) -> Number | None:
        """Return the value of the absent field, None without one."""
        if not self.rules.HasField("default_value"):
            return None
        value = self.rules.default_value
        if self.value_type == FieldDescriptor.TYPE_BOOL:
            return bool(value)
        return value if self.is_fraction else int(value)

    def _fault_of_one(self, value: Any) -> Fault | None:
        if self.descriptor.type in _TEXTS:
            size = len(value) if isinstance(value, bytes) else len(value.encode())
            return self._fault_of_size(size, "bytes")
        if self.descriptor.message_type and not self.is_duration:
            return self._fault_of_size(value.ByteSize(), "bytes")
        number = seconds_of(value) if self.is_duration else value
        if self.holds(number):
            return None
        unit = " s" if self.is_duration else ""
        return Fault("", f"must be {self.bounds()}{unit}, not {shown(number)}{unit}")

    def _fault_of_map(self, values: Mapping[int, float]) -> Fault | None:
        if all(map(self.holds, values.values())):
            return None
        key = next(key for key in sorted(values) if not self.holds(values[key]))
        return Fault(f"[{key}]", f"must be {self.bounds()}, not {shown(values[key])}")

    def _fault_of_size(self, size: int, unit: str) -> Fault | None:
        rules = self.rules
        least: int = getattr(rules, f"min_{unit}")
        has_most = rules.HasField("max_bytes") if unit == "bytes" else rules.HasField("max_entries")
        most: int = getattr(rules, f"max_{unit}") if has_most else size
        if least <= size <= most:
            return None
        if not size and not has_most:
            return Fault("", "must not be empty")
        bounds = f"between {least} and {most}" if least else f"at most {most}"
        return Fault("", f"must have {bounds} {unit}, not {size}")


class FieldPath(NamedTuple):
    """A path from a request to a field."""

    names: tuple[str, ...]
    field: DeclaredField

    @property
    def text(self) -> str:
        """The path as errors have it."""
        return ".".join(self.names)

    def parent(self, request: Message) -> Message | None:
        """Return the message that has the field, None if the request lacks it."""
        for name in self.names[:-1]:
            if not request.HasField(name):
                return None
            request = getattr(request, name)
        return request

    def given(self, request: Message) -> Any:
        """Return the value that a request gives the field, None without one."""
        parent = self.parent(request)
        if parent is None:
            return None
        value = getattr(parent, self.field.name)
        if self.field.descriptor.has_presence:
            return value if parent.HasField(self.field.name) else None
        return value or None

    def set(self, request: Message, value: Any) -> None:
        """Give the field a value: for a list its entries, for a map its members."""
        for name in self.names[:-1]:
            request = getattr(request, name)
        if self.field.is_map:
            getattr(request, self.field.name).update(value)
        elif self.field.descriptor.is_repeated:
            getattr(request, self.field.name).extend(value)
        else:
            setattr(request, self.field.name, value)

    def effective(self, request: Message) -> Any:
        """Return the value of the field, its default where its message is given; None without one."""
        given = self.given(request)
        return self.field.default if given is None and self.parent(request) is not None else given


class _Limit(NamedTuple):
    """A field that must not exceed another."""

    path: FieldPath
    most: FieldPath


class _Excluding(NamedTuple):
    """A message of a request, and the fields that are excluded beside it, each with the value that is not."""

    name: str
    others: tuple[tuple[FieldPath, Number | None], ...]


class _Relations(NamedTuple):
    """The rules of a request that concern several fields."""

    limits: tuple[_Limit, ...]
    excluding: tuple[_Excluding, ...]


class _Plan(NamedTuple):
    """The fields of a message that have rules, those that must not be empty, and those that have fields with rules."""

    declared: dict[str, DeclaredField]
    required: tuple[DeclaredField, ...]
    nested: frozenset[str]


def shown(number: float) -> str:
    """Write a number without a needless fraction."""
    return str(int(number)) if math.isfinite(number) and number == int(number) and abs(number) < 1e15 else repr(number)


def numbers_of(message: Message) -> str:
    """Return the numbers that a message has, such as `temperature 0.6, top_k 20`; empty without any."""
    return ", ".join(f"{field.name} {shown(value)}" for field, value in message.ListFields())


def declared_fields(message: Descriptor) -> Mapping[str, DeclaredField]:
    """Return the fields of a message that have rules, by their names, in their order."""
    return _plan(message).declared


def check(request: Message, refuse: Refusal) -> None:
    """Raise what `refuse` makes for the first field that breaks its rules."""
    check_message(request, refuse)
    relations = _relations(request.DESCRIPTOR)
    for path, most in relations.limits:
        value, limit = path.given(request), most.effective(request)
        if value is not None and limit is not None and value > limit:
            rule = f"must be at most {most.text}, which is {limit}, not {value}"
            raise refuse(f"{path.text} {rule}", path.text)
    for excluding in relations.excluding:
        if request.HasField(excluding.name):
            kind = _kind(getattr(request, excluding.name))
            _check_alone(request, excluding, ".".join((excluding.name, *kind)), refuse)


def check_message(message: Message, refuse: Refusal, prefix: str = "") -> None:
    """Check the fields of a message one by one. `prefix` precedes their names in errors."""
    plan = _plan_of(message)
    for field in plan.required:
        if not getattr(message, field.name):
            raise refuse(f"{prefix}{field.name} must not be empty", f"{prefix}{field.name}")
    for descriptor, value in message.ListFields():
        name = descriptor.name
        if name in plan.declared and (fault := plan.declared[name].fault(value)):
            path = f"{prefix}{name}{fault.place}"
            raise refuse(f"{path} {fault.rule}", path)
        if name in plan.nested:
            if descriptor.is_repeated:
                for at, one in enumerate(value):
                    check_message(one, refuse, f"{prefix}{name}[{at}].")
            else:
                check_message(value, refuse, f"{prefix}{name}.")


def check_alone(request: Message, beside: str, name: str, refuse: Refusal) -> None:
    """Check that a request gives no field that its message `beside` excludes, whether it has that message or not.

    Errors call the message `name`.
    """
    for excluding in _relations(request.DESCRIPTOR).excluding:
        if excluding.name == beside:
            _check_alone(request, excluding, name, refuse)


def fill(message: Message) -> None:
    """Give the absent fields of a message their defaults."""
    for name, field in _plan_of(message).declared.items():
        if field.default is not None and not message.HasField(name):
            setattr(message, name, field.default)


def effective(message: Message, name: str) -> Any:
    """Return the value of a field, its default if it is absent, clamped."""
    field = _plan_of(message).declared[name]
    given = message.HasField(name) or field.default is None
    value: Any = getattr(message, name) if given else field.default
    return field.clamped(value) if field.is_fraction else value


def field_paths(message: Descriptor, prefix: tuple[str, ...] = ()) -> Iterator[FieldPath]:
    """Yield the paths of all declared fields of a message, and of the messages in it that are not in lists."""
    plan = _plan(message)
    for field in message.fields:
        names = (*prefix, field.name)
        if field.name in plan.declared:
            yield FieldPath(names, plan.declared[field.name])
        if field.message_type and field.name in plan.nested and not field.is_repeated:
            yield from field_paths(field.message_type, names)


def _plan_of(message: Message) -> _Plan:
    return _plan(message.DESCRIPTOR)


@cache
def _plan(message: Descriptor) -> _Plan:
    declared = {
        field.name: DeclaredField(field)
        for field in message.fields
        if field.GetOptions().HasExtension(field_rules_pb2.rules)
    }
    required = tuple(one for one in declared.values() if one.is_required)
    nested = frozenset(field.name for field in message.fields if _has_rules(field))
    return _Plan(declared, required, nested)


def _has_rules(field: FieldDescriptor) -> bool:
    kind = field.message_type
    if kind is None or kind.GetOptions().map_entry or not kind.full_name.startswith("quire."):
        return False
    plan = _plan(kind)
    return bool(plan.declared or plan.nested)


@cache
def _relations(request: Descriptor) -> _Relations:
    found = {path.text: path for path in field_paths(request)}
    limits = [_Limit(one, found[most]) for one in found.values() if (most := one.field.rules.at_most) in found]
    excluding = []
    for field in request.fields:
        if field.message_type and not field.is_repeated:
            exclusions = field.message_type.GetOptions().Extensions[field_rules_pb2.excludes]
            others = [(_path(request, one.field), one) for one in exclusions]
            kept = tuple((path, _unless(path, one)) for path, one in others if path is not None)
            if kept:
                excluding.append(_Excluding(field.name, kept))
    return _Relations(tuple(limits), tuple(excluding))


def _path(request: Descriptor, text: str) -> FieldPath | None:
    """Find a field, which may have no rules."""
    *parents, name = text.split(".")
    message: Descriptor | None = request
    for parent in parents:
        field = message.fields_by_name.get(parent) if message else None
        message = field.message_type if field else None
    last = message.fields_by_name.get(name) if message else None
    return FieldPath((*parents, name), DeclaredField(last)) if last else None


def _unless(path: FieldPath, exclusion: field_rules_pb2.Exclusion) -> Number | None:
    return exclusion.unless if exclusion.HasField("unless") else path.field.default


def _kind(message: Message) -> tuple[str, ...]:
    """Return the name of the field that is set, of a message with one oneof."""
    oneofs = [one for one in message.DESCRIPTOR.oneofs if len(one.fields) > 1]
    kind = message.WhichOneof(oneofs[0].name) if oneofs else None
    return (kind,) if kind else ()


def _check_alone(request: Message, excluding: _Excluding, name: str, refuse: Refusal) -> None:
    for path, unless in excluding.others:
        given = path.given(request)
        if given is not None and (unless is None or given != unless):
            raise refuse(f"{path.text} cannot be combined with {name}", path.text)
