"""Which calls of a conversation have outputs. The rules are those of OpenAI's API, and so are its sentences."""

from services.runtime.errors import InvalidField

_MAX_SHOWN = 100


class CallResults:
    """The calls of one conversation, by their ids.

    Some models number their calls anew in each turn. So an id may be repeated once its call has an output.
    """

    def __init__(self) -> None:
        self._calls: dict[str, str] = {}  # the place of the last call of each id
        self._results: dict[str, str] = {}  # the place of its output
        self._items: dict[str, str] = {}  # the places of items by their ids

    def add_item(self, item_id: str | None, path: str) -> None:
        """Add an item. Raises InvalidField if another one has its id."""
        if not item_id:
            return
        if item_id in self._items:
            message = f"Duplicate item found with id {item_id[:_MAX_SHOWN]}. Remove duplicate items from your input and"
            same = f"{path}.id is that of {self._items[item_id]}"
            raise InvalidField(f"{message} try again: {same}", f"{path}.id")
        self._items[item_id] = path

    def add_call(self, call_id: str, path: str) -> None:
        """Add a call. Raises InvalidField if one of the same id waits for its output."""
        if call_id in self._calls and call_id not in self._results:
            earlier = self._calls[call_id]
            raise InvalidField(f"{path}.call_id is that of {earlier}, which has no output before it", f"{path}.call_id")
        self._calls[call_id] = path
        self._results.pop(call_id, None)

    def add_result(self, call_id: str, path: str) -> None:
        """Add an output. Raises InvalidField without a call that waits for it."""
        if call_id not in self._calls:
            raise InvalidField(f"{path}.call_id must be that of an earlier call", f"{path}.call_id")
        if call_id in self._results:
            raise InvalidField(
                f"{path}.call_id must be that of a call without an output: {self._results[call_id]} is one",
                f"{path}.call_id",
            )
        self._results[call_id] = path

    def check(self) -> None:
        """Raise InvalidField if a call has no output."""
        for call_id, path in self._calls.items():
            if call_id not in self._results:
                missing = f"No tool output found for function call {call_id[:_MAX_SHOWN]}."
                raise InvalidField(f"{missing} It is {path}, and no item after it has its call_id.", "input")
