"""Fields of Submission that engines of older versions would ignore, with a wrong answer.

Engines announce these fields, and gateways send requests that have one only to engines that announce it. So services of
different versions can run together. An engine that announces nothing is of version 0.1.0.
"""

from google.protobuf.message import Message

from quire.v1 import engine_pb2

# Paths of the fields added since version 0.1.0. Fields that an engine may ignore do not belong here.
FEATURES = ("bad_words", "constraint.tool_calls")


def required_features(submission: engine_pb2.Submission) -> frozenset[str]:
    """Return the features that an engine needs for this request."""
    return frozenset(path for path in FEATURES if _has(submission, path))


def _has(message: Message, path: str) -> bool:
    name, _, rest = path.partition(".")
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.is_repeated or not field.has_presence:
        return bool(getattr(message, name))
    return message.HasField(name) and (not rest or _has(getattr(message, name), rest))
