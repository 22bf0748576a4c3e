"""The policy for members of a body that have no effect here: what is accepted, and why it cannot change the answer.

Null means everywhere that a member is absent, also of members that no schema has. What would change the answer and is
not served is refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

from services.gateway.http.json_types import Members
from services.runtime.http.validation import UNSUPPORTED


@dataclass(frozen=True)
class UnusedMember:
    """A member without effect. `accepts` is the type of the accepted values, `values` the same in words.

    `refuses_others`: other values would change the answer; `instead` names the member that is served.
    """

    accepts: Any
    values: str
    why: str
    refuses_others: bool = False
    instead: str = ""

    @property
    def field_type(self) -> Any:
        """The type of the member in the schema."""
        return Annotated[self.accepts, WrapValidator(self._refuse_others)] if self.refuses_others else self.accepts

    def _refuse_others(self, given: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(given)
        except ValidationError:
            reason = f"it can only be {self.values}" + (f"; use {self.instead}" if self.instead else "")
            raise PydanticCustomError(UNSUPPORTED, "{reason}", {"reason": reason.replace("`", "'")}) from None

    @property
    def described(self) -> str:
        """The description of the member in the schema."""
        return f"Accepted without effect ({self.values}): {self.why}."


_Empty = Annotated[list[Any], Field(max_length=0)]
_Texts = Members[str]

# By name, in every object of a body: dropped before the object is validated.
ANYWHERE: Mapping[str, str] = {
    "cache_control": "prefixes are cached by their contents, without marks",
    "provider_specific_fields": "it belongs to another server",
}
BODIES: Mapping[str, UnusedMember] = {
    "user": UnusedMember(str, "a string", "it names a user for the provider's records"),
    "safety_identifier": UnusedMember(str, "a string", "it names a user for the provider's records"),
    "metadata": UnusedMember(_Texts, "texts by name", "it labels stored answers, and nothing is stored"),
    "client_metadata": UnusedMember(dict[str, Any], "an object", "it describes the client"),
    "store": UnusedMember(bool, "true or false", "nothing is stored"),
    "service_tier": UnusedMember(str, "a string", "there is one tier"),
    "prompt_cache_key": UnusedMember(str, "a string", "prefixes are cached by their contents"),
    "prompt_cache_retention": UnusedMember(str, "a string", "the pool decides how long prefixes are cached"),
    "prompt_cache_options": UnusedMember(dict[str, Any], "an object", "prefixes are cached by their contents"),
    "spaces_between_special_tokens": UnusedMember(Literal[True], "true", "this is what happens", refuses_others=True),
    "guided_grammar": UnusedMember(
        Literal[""], "an empty string", "it holds the output to nothing", refuses_others=True
    ),
    # SGLang's, which its router and vLLM's add to every body.
    "no_stop_trim": UnusedMember(
        Literal[False], "false", "this is what happens", refuses_others=True, instead="include_stop_str_in_output"
    ),
    "return_hidden_states": UnusedMember(Literal[False], "false", "no hidden states are returned", refuses_others=True),
}
COMPLETIONS: Mapping[str, UnusedMember] = {
    "suffix": UnusedMember(Literal[""], "an empty string", "nothing follows the output", refuses_others=True),
    "add_special_tokens": UnusedMember(Literal[True], "true", "this is what happens", refuses_others=True),
    "reasoning_effort": UnusedMember(Literal["none"], "`none`", "completions have no thoughts", refuses_others=True),
}
CHATS: Mapping[str, UnusedMember] = {
    "modalities": UnusedMember(list[Literal["text"]], '`["text"]`', "answers are text", refuses_others=True),
    "prediction": UnusedMember(dict[str, Any], "an object", "it makes other servers faster"),
    "functions": UnusedMember(_Empty, "an empty list", "it offers nothing", refuses_others=True, instead="tools"),
    "function_call": UnusedMember(
        Literal["none", "auto"],
        "`none` or `auto`",
        "without `functions` it says nothing",
        refuses_others=True,
        instead="tool_choice",
    ),
    "separate_reasoning": UnusedMember(Literal[True], "true", "thoughts are set apart", refuses_others=True),
    "stream_reasoning": UnusedMember(Literal[True], "true", "thoughts are streamed", refuses_others=True),
}
MESSAGES: Mapping[str, UnusedMember] = {
    "parsed": UnusedMember(Any, "anything", "OpenAI's client adds it to the content that it was read from"),
    "refusal": UnusedMember(Literal[""], "an empty string", "nothing was refused", refuses_others=True),
    "annotations": UnusedMember(_Empty, "an empty list", "nothing is annotated", refuses_others=True),
    "thinking_blocks": UnusedMember(list[Any], "a list", "`reasoning_content` has the same thoughts"),
}
PLACES: Mapping[str, Mapping[str, UnusedMember]] = {
    "all that generates": BODIES,
    "completions": COMPLETIONS,
    "chats": CHATS,
    "messages of chats": MESSAGES,
}
