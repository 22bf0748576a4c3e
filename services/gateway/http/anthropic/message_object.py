"""The object `message`, which is the body of an answer and a part of its events."""

from collections.abc import Sequence
from typing import Any

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.http.anthropic.content_blocks import OutputEvents


class MessageObject:
    """Describes one answer. `max_tokens` is what the request asked for, which may be more than fits the context."""

    def __init__(self, started: gateway_pb2.Started, request_id: str, max_tokens: int) -> None:
        self._started = started
        self._max_tokens = max_tokens
        self._fields: dict[str, Any] = {
            "id": request_id,
            "type": "message",
            "role": "assistant",
            "model": started.model,
            **({"warnings": list(started.warnings)} if started.warnings else {}),
        }

    def in_progress(self) -> dict[str, Any]:
        """Return the message at its start."""
        usage = _usage(self._started.prompt_tokens, self._started.cached_tokens, 0)
        return {**self._fields, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}

    def finished(
        self, finished: gateway_pb2.Finished, content: Sequence[dict[str, Any]], output: OutputEvents
    ) -> dict[str, Any]:
        """Return the message at its end."""
        end = self.end(finished, called=output.called)
        return {**self._fields, "content": content, **end, "usage": self.usage(finished, output.thought_tokens)}

    def end(self, finished: gateway_pb2.Finished, *, called: bool) -> dict[str, Any]:
        """Return why the answer ended. `called`: it ends with calls of tools."""
        sample, stop_string = finished.samples[0], None
        if sample.reason == decoding_pb2.FINISH_REASON_LENGTH:
            is_whole = finished.usage.generated_tokens >= self._max_tokens
            reason = "max_tokens" if is_whole else "model_context_window_exceeded"
        elif called:
            reason = "tool_use"
        elif sample.WhichOneof("matched") == "stop_string":
            reason, stop_string = "stop_sequence", sample.stop_string
        else:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop_string}

    def usage(self, finished: gateway_pb2.Finished, thoughts: int) -> dict[str, Any]:
        """Return the token counts of the whole answer. `thoughts` is the number of those in thoughts."""
        counted = finished.usage
        usage = _usage(counted.prompt_tokens, counted.cached_tokens, counted.generated_tokens)
        return usage | {"output_tokens_details": {"thinking_tokens": thoughts}}


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Return token counts. `input_tokens` excludes the cached ones."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }
