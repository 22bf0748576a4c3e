"""How a chat thinks and calls tools: the constraint of its output, and the parser of thoughts and calls."""

from dataclasses import replace

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.dialects.declarations import PLAIN_JSON
from services.gateway.dialects.dialect import CallFormat, Dialect, ThoughtFormat
from services.gateway.dialects.guided_arguments import can_be_guided
from services.gateway.dialects.offered_tools import OfferedTools
from services.gateway.dialects.parser import DialectParser
from services.gateway.http.openai import requests
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.text.tool_choice import call_grammar, calls_schema, in_text

_ANY_OBJECT = '{"type": "object"}'


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
        self._dialect = dialect = tokenizer.chat.dialect
        texts = dialect.calls.form.argument_texts if dialect.calls else None
        callable_ones = [one.parameters or {} for one in offered if self._named in (None, one.name)]
        self._can_be_guided = all(can_be_guided(texts, schema) for schema in callable_ones)
        # Clients send the budget of `thinking` to every model; that of vLLM's field is meant for the model.
        self._budget_is_neutral = body.thinking_token_budget is None
        self._constrained = False
        self._is_strict = choice == "auto" and any(one.strict for one in offered)
        self._free = {one.name for one in offered if not one.strict}
        self._is_held = False  # to calls or an answer
        self._holds_strict_calls = False
        self.warnings: list[str] = []
        self._has_format = bool(offered) and body.response_format is not None and body.response_format.type != "text"

    def prepare(self, request: gateway_pb2.GenerateRequest) -> None:
        """Constrain the output to calls if one is required; else keep the texts that mark thoughts and calls.

        Stop strings and stop tokens do not apply to required calls: they would break the arguments, or match the text
        between calls, which clients do not get.
        """
        if self.required:
            request.constraint.CopyFrom(self._constraint(request))
            for name in ("stop_strings", "stop_token_ids", "include_stop"):
                request.stopping.ClearField(name)
        elif self._has_format and self._dialect.calls and self._can_be_guided:
            request.constraint.tool_calls.CopyFrom(self._call_or_answer(request, self._dialect.calls))
            self._is_held = True
        self._constrained = request.HasField("constraint")
        if self._is_strict and not self._constrained:
            self._hold_strict_calls(request)
        if self._tokenizer.dialect_tokens.are_special and (self._dialect.thought or self._tools.names):
            request.output.special_tokens = True
        if self._budget_is_neutral and not self._dialect.thought:
            request.ClearField("thought")
        if self._constrained and self._thought_before_answer:
            request.thought.SetInParent()  # with the marks of the model

    def parser(self, *, in_thought: bool) -> DialectParser | None:
        """Return a new parser for one sample, None if the output is text.

        `in_thought`: the prompt has begun a thought.
        """
        dialect, thought = self._dialect, self._thought_before_answer
        if self.required:
            held = Dialect(thought, self._required_calls)
            return DialectParser(
                held, self._tools, in_thought=in_thought, is_constrained=True, is_held=True, drops_text=True
            )
        if self._constrained:
            dialect = Dialect(thought, dialect.calls)
        if dialect.calls and self._holds_strict_calls:  # others would not be held
            dialect = replace(dialect, calls=replace(dialect.calls, more_openings=(), more_forms=()))
        if not dialect.thought and not (dialect.calls and self._tools.names):
            return None
        constrained = {"is_constrained": self._constrained, "is_held": self._is_held}
        return DialectParser(dialect, self._tools, in_thought=in_thought, **constrained)

    @property
    def _thought_before_answer(self) -> ThoughtFormat | None:
        """The form of thoughts in front of a constrained output; None on channels, whose answers have headers."""
        return None if self._dialect.channels else self._dialect.thought

    @property
    def _required_calls(self) -> CallFormat:
        """The form of required calls: the model's own, or plain JSON if no grammar can hold the model to its own."""
        calls = self._dialect.calls
        return calls if calls and self._can_be_guided else PLAIN_JSON

    def _call_or_answer(self, request: gateway_pb2.GenerateRequest, calls: CallFormat) -> decoding_pb2.ToolCallGrammar:
        """Return the grammar of calls, or of an answer in the format."""
        grammar = call_grammar(request.prompt.chat.tools, calls, parallel=self._parallel)
        grammar.answer = request.constraint.json_schema or _ANY_OBJECT
        return grammar

    def _hold_strict_calls(self, request: gateway_pb2.GenerateRequest) -> None:
        """Hold calls in free text to a grammar, or warn that there is none for the model's form, or these tools."""
        calls, reason = self._dialect.calls, ""
        if calls is None or self._dialect.channels:
            reason = f"no grammar holds calls of the model's form ({calls.name if calls else 'none'})"
        elif not self._can_be_guided:
            reason = f"a tool's schema cannot be written in the model's form ({calls.name})"
        elif grammar := in_text(
            call_grammar(request.prompt.chat.tools, calls, parallel=self._parallel), calls, self._free
        ):
            request.constraint.tool_calls.CopyFrom(grammar)
            self._holds_strict_calls = True
        else:
            reason = "the schemas of all tools together are too large"
        self.warnings += [f"strict has no effect: {reason}"] * bool(reason)

    def _constraint(self, request: gateway_pb2.GenerateRequest) -> decoding_pb2.OutputConstraint:
        tools = [tool for tool in request.prompt.chat.tools if self._named in (None, tool.name)]
        parallel = self._parallel and self._named is None
        calls = self._required_calls
        if calls is not PLAIN_JSON:
            return decoding_pb2.OutputConstraint(tool_calls=call_grammar(tools, calls, parallel=parallel))
        return decoding_pb2.OutputConstraint(json_schema=calls_schema(tools, parallel=parallel))
