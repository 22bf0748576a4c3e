"""Free text in which calls of tools follow a grammar: from their opening mark to their end.

The state follows from the tokens. No token that goes on behind the mark is allowed, so that the grammar begins with a
token of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.constraint import ConstraintState
from services.engine.guided.grammars import CompiledGrammar
from services.engine.guided.mark_tokens import MarkTokens


class _CallsBesideText:
    """What both constraints have in common."""

    def __init__(self, tokens: MarkTokens, calls: CompiledGrammar) -> None:
        self.tokens = tokens
        self.omitted = calls.omitted
        self._calls = calls

    @property
    def is_exhausted(self) -> bool:
        """See CompiledConstraint."""
        return self._calls.is_exhausted


class FreeTextConstraint(_CallsBesideText):
    """Lets text stand around calls. Implements services.engine.guided.constraints.CompiledConstraint.

    `calls` is the grammar of calls, with their opening mark.
    """

    def __init__(self, tokens: MarkTokens, mark: str, calls: CompiledGrammar) -> None:
        """Begin the grammar. Raises ConstraintFailed if it does not begin with the mark."""
        super().__init__(tokens, calls)
        self.mark = tokens.first_mark(mark)
        self.crossing = tokens.crossing(self.mark.text)
        self.begun = calls.start()
        for token in self.mark.ids:
            self.begun.advance(token)

    def start(self) -> ConstraintState:
        """Return the state of an empty output."""
        return _InText(self)


@dataclass
class _InText:
    """What one output has so far. Implements engine.constraint.ConstraintState.

    `calls` is the state of calls that have begun, None in text. `tail` is the text that may be the beginning of a mark.
    """

    constraint: FreeTextConstraint
    calls: ConstraintState | None = None
    tail: bytes = b""

    @property
    def complete(self) -> bool:
        return False

    def allowed(self) -> bytes:
        if self.calls is not None and not self._may_end(self.calls):
            return self.calls.allowed()
        return self.constraint.tokens.as_bytes(self._free(b"" if self.calls else self.tail))

    def advance(self, token_id: int) -> None:
        if self.calls is not None and self._may_end(self.calls):
            self.calls, self.tail = None, b""
        if self.calls is None:
            self._advance_text(token_id)
        else:
            self.calls.advance(token_id)

    def copy(self) -> "_InText":
        return replace(self, calls=self.calls.copy() if self.calls else None)

    def _may_end(self, calls: ConstraintState) -> bool:
        """Return whether text may follow the calls."""
        allowed = int.from_bytes(calls.allowed(), "little")
        return calls.complete or bool(allowed & self.constraint.tokens.end_mask)

    def _free(self, tail: bytes) -> int:
        """Return the mask of tokens that do not go on behind a mark."""
        free, mark = self.constraint.tokens.all, self.constraint.mark.text
        for length, crossing in enumerate(self.constraint.crossing):
            if tail.endswith(mark[:length]):
                free &= ~crossing
        return free

    def _advance_text(self, token_id: int) -> None:
        mark = self.constraint.mark
        if mark.text:
            tail = self.tail + self.constraint.tokens.text(token_id)
            is_begun, self.tail = tail.endswith(mark.text), tail[-len(mark.text) :]
        else:
            is_begun = token_id == mark.ids[0]
        if is_begun:
            self.calls = self.constraint.begun.copy()


class CallsOrTextConstraint(_CallsBesideText):
    """Holds an output that begins with a call to calls; any other output is text. Implements CompiledConstraint.

    `beginnings` are those of calls, up to the name of a tool and the character behind it. Whitespace in them may differ
    from that of the output, and special tokens may stand in front.
    """

    def __init__(self, tokens: MarkTokens, beginnings: Sequence[str], calls: CompiledGrammar) -> None:
        """Begin the grammar. Raises ConstraintFailed if it does not begin in one of these ways."""
        super().__init__(tokens, calls)
        self.begun = {}
        for beginning in beginnings:
            state = calls.start()
            for token in tokens.spelled(beginning.encode()):
                state.advance(token)
            self.begun[_squeezed(beginning.encode())] = state

    def start(self) -> ConstraintState:
        """Return the state of an empty output."""
        return _AtStart(self)


@dataclass
class _AtStart:
    """What one output has so far. Implements engine.constraint.ConstraintState.

    `text` is the output without whitespace while it may be the beginning of calls, then None.
    """

    constraint: CallsOrTextConstraint
    calls: ConstraintState | None = None
    text: bytes | None = b""

    @property
    def complete(self) -> bool:
        return self.calls is not None and self.calls.complete

    def allowed(self) -> bytes:
        if self.calls is not None:
            return self.calls.allowed()
        tokens = self.constraint.tokens
        free = tokens.all
        if self.text is not None:
            ways = [way[len(self.text) :] for way in self.constraint.begun if way.startswith(self.text)]
            free &= ~tokens.going_beyond(ways)
        return tokens.as_bytes(free)

    def advance(self, token_id: int) -> None:
        if self.calls is not None:
            self.calls.advance(token_id)
        elif self.text is not None and not self.constraint.tokens.is_special(token_id):
            self._advance_text(self.text + _squeezed(self.constraint.tokens.text(token_id)))

    def copy(self) -> "_AtStart":
        return replace(self, calls=self.calls.copy() if self.calls else None)

    def _advance_text(self, text: bytes) -> None:
        begun = self.constraint.begun
        if text in begun:
            self.calls = begun[text].copy()
        self.text = text if any(way.startswith(text) for way in begun) else None


def _squeezed(text: bytes) -> bytes:
    return b"".join(text.split())
