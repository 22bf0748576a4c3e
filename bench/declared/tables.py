"""Tables of what is declared once: a request's fields, from the rules in the protos, and requirements of settings."""

import dataclasses
from collections.abc import Iterator
from itertools import chain

from quire.v1 import gateway_pb2
from services.engine.settings import EngineSettings
from services.gateway.http import member_policy
from services.gateway.http.openai.declared_fields import DECLARED, HTTP_NAMES
from services.runtime.settings import Requires
from services.wire.field_rules import DeclaredField, field_paths

# Default and meaning of HTTP's fields that are true where the declared one is false.
_OPPOSITES = {"skip_special_tokens": ("true", "Removes special tokens from the text.")}


def grpc_table() -> str:
    """Return the table of all fields with rules: their names in gRPC and HTTP, ranges, defaults and meanings."""
    rows = (
        (_name(path.text), _range(path.field), path.field.described_default(), _meaning(path.field))
        for path in field_paths(gateway_pb2.GenerateRequest.DESCRIPTOR)
    )
    return _table(("field", "range", "default", "meaning"), rows)


def http_table() -> str:
    """Return the table of the fields that HTTP has beyond OpenAI's, under vLLM's names."""
    rows = (
        (
            f"`{name}`",
            _range(path.field).replace("stopping.", ""),
            *_OPPOSITES.get(name, (path.field.described_default(), _meaning(path.field))),
        )
        for name, path in DECLARED.items()
        if not path.field.rules.openai
    )
    return _table(("field", "range", "default", "meaning"), rows)


def policy_table() -> str:
    """Return the table of members without effect: where they stand, what is accepted, and why."""
    anywhere = (("every object", f"`{name}`", "anything", why) for name, why in member_policy.ANYWHERE.items())
    others = (
        (place, f"`{name}`", one.values, one.why)
        for place, members in member_policy.PLACES.items()
        for name, one in members.items()
    )
    return _table(("in", "member", "accepted", "because"), chain(anywhere, others))


def requirements_table() -> str:
    """Return the table of what settings of an engine require of each other."""
    rows = (
        (f"`{_condition(field.name, one)}`", f"`{one.other}` must {one.permitted()}", one.because)
        for field in dataclasses.fields(EngineSettings)
        for one in field.metadata["requires"]
    )
    return _table(("with", "requires", "because"), rows)


def _condition(name: str, one: Requires) -> str:
    own = f"{name}={' or '.join(map(str, one.of))}" if one.of else name
    own += "".join(f" (not {value})" for value in one.besides)
    return " ".join((own, *(f"{other}={value}" for other, value in one.where.items())))


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    rule = f"|{'---|' * len(head)}"
    lines = [" ".join(f"| {cell}" if cell else "|" for cell in line) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], rule, *lines[1:], ""])


def _name(path: str) -> str:
    own = path.rsplit(".", 1)[-1]
    http = HTTP_NAMES.get(path, own)
    return f"`{path}`" if http == own else f"`{path}` (`{http}`)"


def _range(field: DeclaredField) -> str:
    rules = field.rules
    size = f"{rules.min_bytes} to {rules.max_bytes} bytes" if rules.min_bytes else f"at most {rules.max_bytes} bytes"
    parts = [
        f"at most {rules.max_entries}" * rules.HasField("max_entries"),
        size * rules.HasField("max_bytes"),
        "not empty" * (rules.min_entries == 1 or (rules.min_bytes == 1 and not rules.HasField("max_bytes"))),
        _bounds(field),
        f"at most `{rules.at_most}`" * bool(rules.at_most),
    ]
    return ", ".join(part for part in parts if part)


def _bounds(field: DeclaredField) -> str:
    """Shorten the sentence that errors have."""
    bounds = (
        field.bounds().removeprefix("a ").replace("finite number of", "finite,").replace("finite number ", "finite, ")
    )
    if bounds.startswith("between "):
        bounds = bounds.removeprefix("between ").replace(" and ", " to ")
    return "finite" if bounds == "finite number" else bounds


def _meaning(field: DeclaredField) -> str:
    rules = field.rules
    clamps = [f"at least {_power(rules.clamp_min)}"] * rules.HasField("clamp_min")
    clamps += [f"at most {_power(rules.clamp_max)}"] * rules.HasField("clamp_max")
    sentences = [rules.summary, f"Counts as {' and '.join(clamps)}." if clamps else "", _sentence(rules.remark)]
    return " ".join(one for one in sentences if one)


def _power(number: float) -> str:
    return f"{number:g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""
