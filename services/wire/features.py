"""Fields that services of older versions would ignore, with a wrong effect.

Engines announce fields of Submission, and gateways send requests that have one only to engines that announce it. KV
managers announce fields of an Attach stream, and engines leave out others. So services of different versions can run
together. A service that announces nothing is of version 0.1.0.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor

from quire.v1 import engine_pb2, field_rules_pb2, kvmanager_pb2
from services.wire.field_rules import field_paths

_ADDED = tuple(path for path in field_paths(engine_pb2.Submission.DESCRIPTOR) if path.field.rules.since)
# Paths of the fields added since version 0.1.0. Fields that an engine may ignore have no `since` in their rules.
FEATURES = tuple(path.text for path in _ADDED)


def _added(message: Descriptor, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all fields that were added since version 0.1.0."""
    for field in message.fields:
        if field.GetOptions().Extensions[field_rules_pb2.rules].since:
            yield f"{prefix}{field.name}"
        elif field.message_type and field.message_type.full_name.startswith("quire."):
            yield from _added(field.message_type, f"{prefix}{field.name}.")


# Fields of an Attach stream, by their paths from PoolRequest.
MANAGER_FEATURES = tuple(_added(kvmanager_pb2.PoolRequest.DESCRIPTOR))


def without_features(request: kvmanager_pb2.PoolRequest, missing: Iterable[str]) -> None:
    """Clear the fields that a KV manager lacks. What an engine needs is refused before."""
    for path in missing:
        kind, *parents, name = path.split(".")
        messages: list[Any] = [getattr(request, kind)] * (request.WhichOneof("kind") == kind)
        for parent in parents:
            found = [getattr(one, parent) for one in messages]
            messages = [one for value in found for one in (value if isinstance(value, Sequence) else (value,))]
        for one in messages:
            one.ClearField(name)


def required_features(submission: engine_pb2.Submission) -> frozenset[str]:
    """Return the features that an engine needs for this request: of the fields that are not at their default."""
    return frozenset(path.text for path in _ADDED if path.given(submission) not in (None, path.field.default))
