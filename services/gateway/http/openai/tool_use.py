"""How a chat calls tools: the constraint of its output, and the parser of the calls."""

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.http.openai import requests
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.text.tool_calls import (
    ArgumentsParser,
    EnforcedCallParser,
    ToolCallParser,
    ToolFormat,
    parser_for,
)
from services.gateway.text.tool_choice import arguments_schema, call_grammar, calls_schema


class ToolUse:
    """The tools of one chat, in the format of its model."""

    def __init__(self, body: requests.ChatCompletionRequest, tokenizer: Tokenizer) -> None:
        choice = "none" if not body.tools else body.tool_choice or "auto"
        self._names = frozenset(tool.function.name for tool in body.tools or ())
        self._named = choice.function.name if isinstance(choice, requests.NamedTool) else None
        self.required = self._named is not None or choice == "required"
        self._off = choice == "none"
        self._parallel = body.parallel_tool_calls is not False
        self._tokenizer = tokenizer
        self._format = tokenizer.chat.tool_format

    def prepare(self, request: gateway_pb2.GenerateRequest) -> None:
        """Constrain the output to calls if one is required; else keep the texts that mark calls.

        Stop strings and stop tokens do not apply to required calls: they would break the arguments, or match the text
        between calls, which clients do not get.
        """
        if self._off:
            return
        if self.required:
            request.constraint.CopyFrom(self._constraint(request))
            for name in ("stop_strings", "stop_token_ids", "include_stop"):
                request.stopping.ClearField(name)
        elif self._tokenizer.is_special_token(self._format.start_marker):
            request.output.special_tokens = True

    def parser(self) -> ToolCallParser | None:
        """Return a new parser for one sample, None if the output is text."""
        if self._off:
            return None
        if not self.required:
            return parser_for(self._format, self._names)
        if self._named is None or self._format is ToolFormat.TAGGED:
            return EnforcedCallParser()
        return ArgumentsParser(self._named)

    def _constraint(self, request: gateway_pb2.GenerateRequest) -> decoding_pb2.OutputConstraint:
        tools = [tool for tool in request.prompt.chat.tools if self._named in (None, tool.name)]
        parallel = self._parallel and self._named is None
        if self._format is ToolFormat.TAGGED:
            return decoding_pb2.OutputConstraint(tool_calls=call_grammar(tools, parallel=parallel))
        schema = calls_schema(tools, parallel=parallel) if self._named is None else arguments_schema(tools[0])
        return decoding_pb2.OutputConstraint(json_schema=schema)
