"""The fields of a request that the HTTP API has as the contract declares them, under OpenAI's or vLLM's names."""

from collections.abc import Mapping
from typing import Any

from quire.v1 import gateway_pb2
from services.wire.field_rules import FieldPath, field_paths

# Fields that HTTP has in a form of its own; the translation converts them by hand.
_BY_HAND = ("request_id", "prompt.", "beam_search.", "constraint.", "stopping.max_tokens", "output.logprobs", "timeout")
# Fields that HTTP does not have: the marks are those of the model.
_GRPC_ALONE = ("thought.begin", "thought.end")
_PATHS = list(field_paths(gateway_pb2.GenerateRequest.DESCRIPTOR))

# The declared fields by their names in HTTP.
DECLARED: Mapping[str, FieldPath] = {
    path.field.http_name: path for path in _PATHS if not path.text.startswith((*_BY_HAND, *_GRPC_ALONE))
}
# The names in HTTP of all fields but prompts and constraints, by their paths.
HTTP_NAMES = {
    path.text: path.field.http_name for path in _PATHS if not path.text.startswith(("prompt.", "constraint."))
}


def set_declared(request: gateway_pb2.GenerateRequest, values: Mapping[str, Any]) -> None:
    """Set the declared fields of a request from values by their names in HTTP; None leaves a field absent."""
    for name, value in values.items():
        if value is not None:
            DECLARED[name].set(request, value)
