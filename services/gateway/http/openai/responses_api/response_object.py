"""The object `response`, which is the body of an answer and a part of its events."""

import time
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.http.openai.responses_api.request_schemas import ResponsesRequest

_TEXT = {"type": "text"}
# Members that clients expect in a tool of the type, null if the request did not set them.
_TOOL: dict[str, dict[str, Any]] = {"function": {"description": None, "parameters": None, "strict": None}}
_UNFINISHED: dict[str, Any] = {
    "completed_at": None,
    "error": None,
    "incomplete_details": None,
    "output": [],
    "usage": None,
}


class ResponseObject:
    """Describes one response: what the request set, and its output so far."""

    def __init__(self, body: ResponsesRequest, started: gateway_pb2.Started, created: int) -> None:
        """`created` is in seconds since 1970."""
        self._fields = {
            "id": started.request_id,
            "object": "response",
            "created_at": created,
            "model": started.model,
            "temperature": started.sampling.temperature,
            "top_p": started.sampling.top_p,
            **({"warnings": list(started.warnings)} if started.warnings else {}),
            **_echo(body),
        }

    def in_progress(self) -> dict[str, Any]:
        """Return the response at its start."""
        return self._with("in_progress")

    def finished(
        self, finished: gateway_pb2.Finished, output: Sequence[dict[str, Any]], reasoning_tokens: int = 0
    ) -> dict[str, Any]:
        """Return the response at its end."""
        status = status_of_end(finished.samples[0])
        complete = status == "completed"
        return self._with(
            status,
            completed_at=int(time.time()) if complete else None,
            incomplete_details=None if complete else {"reason": "max_output_tokens"},
            output=output,
            usage=_usage(finished.usage, reasoning_tokens),
        )

    def failed(self, output: Sequence[dict[str, Any]], code: str, message: str) -> dict[str, Any]:
        """Return a response that an error ended."""
        return self._with("failed", output=output, error={"code": code, "message": message})

    def _with(self, status: str, **fields: Any) -> dict[str, Any]:
        return {**self._fields, "status": status, **_UNFINISHED, **fields}


def status_of_end(end: gateway_pb2.SampleFinish) -> str:
    """Return the status of a response, and of its last item."""
    return "incomplete" if end.reason == decoding_pb2.FINISH_REASON_LENGTH else "completed"


def _echo(body: ResponsesRequest) -> dict[str, Any]:
    """Return the fields that the request set, and those that have one value only."""
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "text": {"format": _TEXT, **_dumped(body.text)} if body.text else {"format": _TEXT},
        "tool_choice": _dumped(body.tool_choice)
        if isinstance(body.tool_choice, BaseModel)
        else body.tool_choice or "auto",
        "tools": [_TOOL.get(tool.type, {}) | _dumped(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "user": body.user,
    }


def _dumped(part: BaseModel) -> dict[str, Any]:
    return part.model_dump(by_alias=True, exclude_none=True)


def _usage(usage: gateway_pb2.Usage, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.generated_tokens,
    }
