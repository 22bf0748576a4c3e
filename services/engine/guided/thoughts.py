"""Constraints that begin after a thought, and the end of a thought that has used up its tokens.

A thought is free text up to its end mark. So an output has up to four phases, and the state of each follows from the
tokens: the *beginning*, where a thought or the answer may begin; the *thought*; the *gap*, new lines behind it; the
*answer*.
"""

from dataclasses import dataclass, replace
from enum import Enum

from engine.constraint import Constraint, ConstraintState
from engine.errors import ConstraintFailed, InvalidRequest
from quire.v1 import decoding_pb2
from services.engine.guided.mark_tokens import Mark, MarkTokens

_MAX_GAP = 2  # tokens of new lines between a thought and the answer


class Phase(Enum):
    """What the next token belongs to."""

    BEGINNING = "beginning"
    THOUGHT = "thought"
    GAP = "gap"
    ANSWER = "answer"


class ThoughtConstraint:
    """Lets an output begin with a thought. Implements engine.constraint.Constraint.

    `answer` is the constraint of what follows the thought, if any.
    """

    def __init__(self, tokens: MarkTokens, thought: decoding_pb2.Thought, answer: Constraint | None = None) -> None:
        """Read a thought. Raises InvalidRequest."""
        if not thought.end:
            raise InvalidRequest("thought.end must not be empty", "thought.end")
        self.tokens = tokens
        self.begin = tokens.mark(thought.begin) if thought.begin else None
        self.end = tokens.mark(thought.end)
        self.most = thought.max_tokens if thought.HasField("max_tokens") else None
        self.answer = answer
        self.omitted: tuple[str, ...] = getattr(answer, "omitted", ())
        self.crossing = tokens.crossing(self.end.text)
        self.completing = tokens.completing(self.begin.text) if self.begin and self.most == 0 else []

    @property
    def is_exhausted(self) -> bool:
        """See services.engine.guided.constraints.CompiledConstraint; it is not kept."""
        return False

    def start(self) -> ConstraintState:
        """Return the state of an empty output."""
        answer, begun = (self.answer.start() if self.answer else None for _ in range(2))
        return _State(self, answer, begun, Phase.BEGINNING if self.begin else Phase.THOUGHT)


@dataclass
class _State:
    """What one output has so far. Implements engine.constraint.ConstraintState.

    `begun` is the answer if the output begins with it, and None if that is free; `is_answer` whether it still can be
    that. `written` is the number of tokens of an end mark that is being written, `counted` those of the thought or the
    gap, and `tail` the text that may be the beginning of a mark.
    """

    constraint: ThoughtConstraint
    answer: ConstraintState | None
    begun: ConstraintState | None
    phase: Phase
    is_answer: bool = True
    written: int = 0
    counted: int = 0
    tail: bytes = b""

    @property
    def complete(self) -> bool:
        return self.phase is Phase.ANSWER and self.answer is not None and self.answer.complete

    def allowed(self) -> bytes:
        tokens = self.constraint.tokens
        match self.phase:
            case Phase.BEGINNING:
                return tokens.as_bytes(self._at_beginning())
            case Phase.THOUGHT:
                return tokens.as_bytes(self._in_thought())
            case Phase.GAP if self.counted < _MAX_GAP:
                return tokens.as_bytes(self._of_answer() | tokens.new_lines)
        return self.answer.allowed() if self.answer else tokens.as_bytes(tokens.all)

    def advance(self, token_id: int) -> None:
        match self.phase:
            case Phase.BEGINNING:
                self._advance_beginning(token_id)
            case Phase.THOUGHT:
                self._advance_thought(token_id)
            case Phase.GAP if self.counted < _MAX_GAP and self.constraint.tokens.new_lines >> token_id & 1:
                self.counted += 1
            case _:
                self._advance_answer(token_id)

    def copy(self) -> "_State":
        answer, begun = (state.copy() if state else None for state in (self.answer, self.begun))
        return replace(self, answer=answer, begun=begun)

    def _of_answer(self) -> int:
        if self.answer is None:
            return self.constraint.tokens.all
        return int.from_bytes(self.answer.allowed(), "little")

    def _at_beginning(self) -> int:
        """Return the mask of tokens that begin the answer, or go on with the mark of a thought."""
        constraint, begin = self.constraint, self.constraint.begin
        assert begin is not None, "else the output begins in the thought"
        of_answer = 0
        if self.is_answer:
            of_answer = int.from_bytes(self.begun.allowed(), "little") if self.begun else constraint.tokens.all
        if constraint.most == 0:
            completing = constraint.completing[len(self.tail)] if begin.text else 1 << begin.ids[0]
            return of_answer & ~completing
        return of_answer | 1 << self._next_of_mark(begin)

    def _next_of_mark(self, mark: Mark) -> int:
        rest = mark.text[len(self.tail) :]
        return self.constraint.tokens.spelled(rest)[0] if mark.text else mark.ids[0]

    def _in_thought(self) -> int:
        constraint, tokens = self.constraint, self.constraint.tokens
        if self.written or self._is_used_up:
            return 1 << constraint.end.ids[self.written]
        free = tokens.all if self.answer is None else tokens.without_ends
        for length, crossing in enumerate(constraint.crossing):
            if self.tail.endswith(constraint.end.text[:length]):
                free &= ~crossing
        return free

    @property
    def _is_used_up(self) -> bool:
        return self.constraint.most is not None and self.counted >= self.constraint.most

    def _advance_beginning(self, token_id: int) -> None:
        constraint, begin = self.constraint, self.constraint.begin
        assert begin is not None, "else the output begins in the thought"
        text = self.tail + constraint.tokens.text(token_id)
        text = text.lstrip()  # a thought may stand behind whitespace
        is_thought = text.startswith(begin.text) if begin.text else token_id == begin.ids[0]
        if is_thought and constraint.most != 0:
            self.phase, self.tail = Phase.THOUGHT, text[len(begin.text) :] if begin.text else b""
            return
        self._advance_begun(token_id)
        if self._may_still_begin(begin, text, token_id):
            self.tail = text
        elif not self.is_answer:
            raise ConstraintFailed(f"token {token_id} cannot follow")
        else:
            self.phase, self.answer, self.tail = Phase.ANSWER, self.begun, b""

    def _may_still_begin(self, begin: Mark, text: bytes, token_id: int) -> bool:
        is_blank = not text and token_id not in self.constraint.tokens.ends
        return is_blank or bool(begin.text and text and begin.text.startswith(text))

    def _advance_begun(self, token_id: int) -> None:
        if self.begun is None or not self.is_answer:
            return
        try:
            self.begun.advance(token_id)
        except ConstraintFailed:
            self.is_answer = False

    def _advance_thought(self, token_id: int) -> None:
        end = self.constraint.end
        if self.written or self._is_used_up:
            if token_id != end.ids[self.written]:
                raise ConstraintFailed(f"token {token_id} cannot follow: the tokens of the thought are used up")
            self.written += 1
            if self.written == len(end.ids):
                self._end_thought()
            return
        self.counted += 1
        if self.answer is not None and token_id in self.constraint.tokens.ends:
            raise ConstraintFailed("the output ended in its thought")
        if not end.text:
            if token_id == end.ids[0]:
                self._end_thought()
            return
        tail = self.tail + self.constraint.tokens.text(token_id)
        self.tail = tail[-len(end.text) :]
        if tail.endswith(end.text):
            self._end_thought()

    def _end_thought(self) -> None:
        self.phase, self.written, self.counted, self.tail = Phase.GAP, 0, 0, b""

    def _advance_answer(self, token_id: int) -> None:
        self.phase = Phase.ANSWER
        if self.answer is not None:
            self.answer.advance(token_id)
