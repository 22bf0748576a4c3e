"""Checks that each call of the assistant has one result, as OpenAI's API does, with the words of its errors."""

from dataclasses import dataclass, field
from itertools import islice

from quire.v1 import gateway_pb2
from services.runtime.errors import InvalidField
from services.runtime.http.validation import shown

_MOST_IDS = 16  # in a message
# Templates may have others, for results of their own form.
_OTHER_ROLES = ("system", "developer", "user", "assistant")


def check_results(chat: gateway_pb2.Chat) -> None:
    """Raise InvalidField unless each call has one result behind it, before the next message of another role.

    Calls and results are matched by their ids, which later messages may use again. The calls of the last message need
    results only if the assistant's next turn follows. Calls without ids are not checked.
    """
    turn = _Turn({})
    for at, message in enumerate(chat.messages):
        path = f"prompt.chat.messages[{at}]"
        if message.role == "tool":
            turn.add_result(message.tool_call_id, path)
        elif message.role in _OTHER_ROLES:
            turn.check_complete()
            turn = _Turn.of(message, path)
    if chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not chat.continue_final_message:
        turn.check_complete()


@dataclass
class _Turn:
    """The calls of one message that have no result, as their places by id, and the messages of results by id."""

    calls: dict[str, str]
    has_all_ids: bool = True
    results: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, message: gateway_pb2.ChatMessage, path: str) -> "_Turn":
        """Return the turn that a message begins. Raises InvalidField for a repeated id."""
        calls: dict[str, str] = {}
        for number, call in enumerate(message.tool_calls):
            place = f"{path}.tool_calls[{number}].id"
            if call.id and call.id in calls:
                raise InvalidField(f"{place} must differ from {calls[call.id]}", place)
            calls[call.id] = place
        return cls(calls, has_all_ids="" not in calls)

    def add_result(self, call_id: str, path: str) -> None:
        """Match a result with its call. Raises InvalidField."""
        place = f"{path}.tool_call_id"
        if not call_id:
            raise InvalidField(f"{place} is missing", place)
        if call_id in self.results:
            fault = f"Duplicate value for 'tool_call_id' of {shown(call_id)}, in {self.results[call_id]} and {path}"
            raise InvalidField(f"{place}: {fault}", place)
        if call_id not in self.calls and self.has_all_ids:
            fault = "messages with role 'tool' must be a response to a preceding message with 'tool_calls'"
            raise InvalidField(f"{place} is the id of no call in front of it: {fault}", place)
        self.calls.pop(call_id, None)
        self.results[call_id] = path

    def check_complete(self) -> None:
        """Raise InvalidField if a call has no result."""
        if not self.calls or not self.has_all_ids:
            return
        place = next(iter(self.calls.values()))
        raise InvalidField(
            f"{place} has no result: an assistant message with 'tool_calls' must be followed by tool messages"
            " responding to each 'tool_call_id'. The following tool_call_ids did not have response messages:"
            f" {', '.join(map(shown, islice(self.calls, _MOST_IDS)))}",
            place,
        )
