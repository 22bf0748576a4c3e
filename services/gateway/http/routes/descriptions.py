"""Parts of the OpenAPI description that several endpoints share."""

from typing import Any

from services.gateway.http.openai import responses

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": responses.Error, "description": meaning}
    for status, meaning in {
        400: "The request is invalid; `param` names the field.",
        401: "The API key is missing, invalid or expired.",
        403: "The API key does not permit the request.",
        404: "The model is not served.",
        408: "The client sent the request or read the response too slowly.",
        409: "The request id is in use.",
        413: "The body is too large.",
        415: "The body is not plain JSON.",
        429: "The queue is full, or the tenant is at a limit. Retry after `Retry-After`.",
        431: "The headers are too large.",
        500: "Internal server error.",
        503: "The gateway is draining, or no engine of the model is ready.",
        504: "Deadline exceeded, in the queue, before the first token or while running; the message names which.",
    }.items()
}
ERRORS[429]["headers"] = {
    name: {"description": meaning, "required": True, "schema": {"type": "integer", "minimum": 1}}
    for name, meaning in (
        ("Retry-After", "Seconds to wait before a retry."),
        ("Retry-After-Ms", "Milliseconds to wait before a retry."),
    )
}


def event_stream(data: str) -> dict[str, Any]:
    """Describe a stream of events; `data` describes the data of each."""
    event = {
        "type": "object",
        "properties": {"data": {"type": "string", "description": data}},
        "required": ["data"],
    }
    return {"text/event-stream": {"schema": event}}
