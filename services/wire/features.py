"""Fields of Submission that engines of older versions would ignore, with a wrong answer.

Engines announce these fields, and gateways send requests that have one only to engines that announce it. So services of
different versions can run together. An engine that announces nothing is of version 0.1.0.
"""

from quire.v1 import engine_pb2
from services.wire.field_rules import field_paths

_ADDED = tuple(path for path in field_paths(engine_pb2.Submission.DESCRIPTOR) if path.field.rules.since)
# Paths of the fields added since version 0.1.0. Fields that an engine may ignore have no `since` in their rules.
FEATURES = tuple(path.text for path in _ADDED)


def required_features(submission: engine_pb2.Submission) -> frozenset[str]:
    """Return the features that an engine needs for this request: of the fields that are not at their default."""
    return frozenset(path.text for path in _ADDED if path.given(submission) not in (None, path.field.default))
