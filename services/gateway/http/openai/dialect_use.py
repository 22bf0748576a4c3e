"""How a chat thinks and calls tools: the constraint of its output, and the parser of thoughts and calls."""

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.dialects.declarations import DEFAULT_CALLS, PLAIN_JSON
from services.gateway.dialects.dialect import Dialect
from services.gateway.dialects.offered_tools import OfferedTools
from services.gateway.dialects.parser import DialectParser
from services.gateway.http.openai import requests
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.text.tool_choice import call_grammar, calls_schema


class DialectUse:
    """The tools and thoughts of one chat, in the dialect of its model."""

    def __init__(self, body: requests.ChatCompletionRequest, tokenizer: Tokenizer) -> None:
        choice = "none" if not body.tools else body.tool_choice or "auto"
        self._named = choice.function.name if isinstance(choice, requests.NamedTool) else None
        self.required = self._named is not None or choice == "required"
        offered = [] if choice == "none" else [tool.function for tool in body.tools or ()]
        self._tools = OfferedTools({one.name: one.parameters or {} for one in offered})
        self._parallel = body.parallel_tool_calls is not False
        self._tokenizer = tokenizer
        self._dialect = tokenizer.chat.dialect
        self._constrained = False

    def prepare(self, request: gateway_pb2.GenerateRequest) -> None:
        """Constrain the output to calls if one is required; else keep the texts that mark thoughts and calls.

        Stop strings and stop tokens do not apply to required calls: they would break the arguments, or match the text
        between calls, which clients do not get.
        """
        if self.required:
            request.constraint.CopyFrom(self._constraint(request))
            for name in ("stop_strings", "stop_token_ids", "include_stop"):
                request.stopping.ClearField(name)
        elif self._tokenizer.dialect_tokens.are_special and (self._dialect.thought or self._tools.names):
            request.output.special_tokens = True
        self._constrained = request.HasField("constraint")

    def parser(self, *, in_thought: bool) -> DialectParser | None:
        """Return a new parser for one sample, None if the output is text.

        `in_thought`: the prompt has begun a thought. A constrained output has none.
        """
        if self.required:
            calls = DEFAULT_CALLS if self._writes_default else PLAIN_JSON
            return DialectParser(Dialect(calls=calls), self._tools, drops_text=True)
        dialect = self._dialect
        if self._constrained:
            dialect, in_thought = Dialect(calls=dialect.calls), False
        if not dialect.thought and not (dialect.calls and self._tools.names):
            return None
        return DialectParser(dialect, self._tools, in_thought=in_thought)

    @property
    def _writes_default(self) -> bool:
        return self._dialect.calls is DEFAULT_CALLS

    def _constraint(self, request: gateway_pb2.GenerateRequest) -> decoding_pb2.OutputConstraint:
        tools = [tool for tool in request.prompt.chat.tools if self._named in (None, tool.name)]
        parallel = self._parallel and self._named is None
        if self._writes_default:
            return decoding_pb2.OutputConstraint(tool_calls=call_grammar(tools, parallel=parallel))
        return decoding_pb2.OutputConstraint(json_schema=calls_schema(tools, parallel=parallel))
