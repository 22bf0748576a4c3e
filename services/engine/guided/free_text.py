"""Free text in which calls of tools follow a grammar: from their opening mark to their end.

The state follows from the tokens. No token that goes on behind the mark is allowed, so that the grammar begins with a
token of its own.
"""

from dataclasses import dataclass, replace

from engine.constraint import ConstraintState
from services.engine.guided.grammars import CompiledGrammar
from services.engine.guided.mark_tokens import MarkTokens


class FreeTextConstraint:
    """Lets text stand around calls. Implements services.engine.guided.constraints.CompiledConstraint.

    `calls` is the grammar of calls with the opening mark. The mark counts `only_at_start` of an output if it is no mark
    that text lacks; whitespace may stand in front of it.
    """

    def __init__(self, tokens: MarkTokens, mark: str, calls: CompiledGrammar, *, only_at_start: bool) -> None:
        """Begin the grammar. Raises ConstraintFailed if it does not begin with the mark."""
        self.tokens = tokens
        self.mark = tokens.first_mark(mark)
        self.only_at_start = only_at_start
        self.omitted = calls.omitted
        self.crossing = tokens.crossing(self.mark.text)
        self.begun = calls.start()
        for token in self.mark.ids:
            self.begun.advance(token)

    def start(self) -> ConstraintState:
        """Return the state of an empty output."""
        return _State(self)


@dataclass
class _State:
    """The state of one output. Implements engine.constraint.ConstraintState.

    `calls` is the state of calls that have begun, None in text. `tail` is the text that may be the beginning of a mark.
    """

    constraint: FreeTextConstraint
    calls: ConstraintState | None = None
    tail: bytes = b""
    may_begin: bool = True

    @property
    def complete(self) -> bool:
        return self.calls is not None and self.constraint.only_at_start and self.calls.complete

    def allowed(self) -> bytes:
        if self.calls is not None and not self._may_go_on():
            return self.calls.allowed()
        return self.constraint.tokens.as_bytes(self._in_text(b"" if self.calls else self.tail))

    def advance(self, token_id: int) -> None:
        if self.calls is not None and self._may_go_on():
            self.calls, self.tail = None, b""
        if self.calls is not None:
            self.calls.advance(token_id)
        elif self.may_begin:
            self._advance_text(token_id)

    def copy(self) -> "_State":
        return replace(self, calls=self.calls.copy() if self.calls else None)

    def _may_go_on(self) -> bool:
        """Return whether the calls may end, so that text follows."""
        if self.calls is None or self.constraint.only_at_start:
            return False
        allowed = int.from_bytes(self.calls.allowed(), "little")
        return self.calls.complete or bool(allowed & self.constraint.tokens.end_mask)

    def _in_text(self, tail: bytes) -> int:
        """Return the mask of tokens that do not go on behind a mark."""
        tokens, mark = self.constraint.tokens, self.constraint.mark.text
        free = tokens.all
        if not mark or not self.may_begin:
            return free
        for length, crossing in enumerate(self.constraint.crossing):
            if tail == mark[:length] if self.constraint.only_at_start else tail.endswith(mark[:length]):
                free &= ~crossing
        return free

    def _advance_text(self, token_id: int) -> None:
        constraint = self.constraint
        mark = constraint.mark
        if not mark.text:
            is_begun, self.may_begin = token_id == mark.ids[0], not constraint.only_at_start
        elif constraint.only_at_start:
            self.tail = (self.tail + constraint.tokens.text(token_id)).lstrip()
            is_begun, self.may_begin = self.tail == mark.text, mark.text.startswith(self.tail)
        else:
            tail = self.tail + constraint.tokens.text(token_id)
            is_begun, self.tail = tail.endswith(mark.text), tail[-len(mark.text) :]
        if is_begun:
            self.calls = constraint.begun.copy()
