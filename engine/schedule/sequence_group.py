"""Requests as they run: a group of sequences, one for each sample or beam, that share what they have in common.

A group begins as one sequence, its *trunk*: the tokens that all samples have in common are computed once, through the
trunk's blocks. Then the others are forked from it, and from there on each goes its own way. A preempted group comes
back the same way. A request of one sample is a group that needs no fork.

The beams of a search begin as one sequence too, and branch at every step: the first beam that goes on from another
takes over its sequence, the next ones are forked from it, and a sequence that none goes on from is pruned.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from engine.constraint import ConstraintState, allows_any
from engine.errors import ConstraintFailed
from engine.schedule.beams import BeamAnswer, Beams, Continuation
from engine.schedule.request import NO_RULES, Failure, FinishReason, OrderKey, Request
from engine.schedule.stats import RequestStats
from engine.schedule.step_plan import RowRules


@dataclass(eq=False)
class Sequence:
    """One sample or beam on its way: its tokens, its blocks, and how far it is computed.

    `PoolView` writes `table`, `room` (tokens that fit into the blocks) and `swapped` (the table has host blocks).
    `Releases` writes `release_pending` (the next Step frees the blocks). `computed` counts tokens whose K and V are in
    the cache, `committed` the leading blocks that have keys, and `sent` the computed tokens last reported to the block
    manager. The next Step forks the sequence from `parent`. `score` belongs to an answer of a beam search. `state` is
    the state of the constraint, and `mask` the tokens it allows next.
    """

    id: int
    group: "Group"
    index: int
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    room: int = 0
    computed: int = 0
    committed: int = 0
    sent: int = 0
    lost_tokens: int = 0
    release_pending: bool = False
    swapped: bool = False
    finish: FinishReason | None = None
    stop_token: int | None = None
    parent: "Sequence | None" = None
    score: float | None = None
    state: ConstraintState | None = None
    mask: bytes = b""

    @property
    def request(self) -> Request:
        """The request that it is a sample of."""
        return self.group.request

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens that are known but not computed: 1 while decoding, more while a prompt is prefilled."""
        return self.group.end_of(self) - self.computed

    @property
    def schedulable_tokens(self) -> int:
        """Tokens that it can be fed next. Beams take their last one together: none goes on before all are there."""
        behind = (
            self.group.beams is not None
            and len(self.group.live) > 1
            and self.group.forked
            and self.uncomputed_tokens > 1
        )
        return self.uncomputed_tokens - behind

    @property
    def max_slots(self) -> int:
        """Slots it can need at most before it is forked or ends: the last token generated is never fed back."""
        if not self.group.forked:
            return self.group.common
        return len(self.request.prompt) + self.request.stopping.max_tokens - 1

    def rules_at(self, end: int) -> RowRules | None:
        """Return what changes the logits after its first `end` tokens, None where nothing does."""
        request, length = self.request, len(self.request.prompt)
        rules, banned = request.logit_rules, request.stopping.banned_after(end - length)
        if self.mask and banned and not allows_any(self.mask, banned):
            banned = frozenset()  # the language has nothing else left, and it goes first
        if rules.penalizes:
            return RowRules(rules, request.prompt, tuple(self.tokens[length:end]), banned, self.mask)
        if banned or self.mask or rules != NO_RULES:
            return RowRules(rules, banned_token_ids=banned, mask=self.mask)
        return None

    # Its tokens.

    def start_constraint(self) -> None:
        """Find out what can follow what was generated before. Raises ConstraintFailed, also where nothing can."""
        if constraint := self.request.constraint:
            self.state = constraint.start()
            for token in self.tokens[len(self.request.prompt) :]:
                self.state.advance(token)
            self.mask = self.state.allowed()
            if self.generated and self.state.complete:
                raise ConstraintFailed("it is complete, so its sample has ended")

    def append(self, token: int) -> None:
        """Take a sampled token, and finish where it ends the sequence. Raises ConstraintFailed."""
        stopping = self.request.stopping
        if token in stopping.token_ids:
            self.tokens.append(token)
            self.finish, self.stop_token = FinishReason.STOP, token
            return
        self.continue_with(token)
        if self.state is not None and self.state.complete:
            self.finish = FinishReason.STOP
        elif self.generated >= stopping.max_tokens:
            self.finish = FinishReason.LENGTH

    def continue_with(self, token: int) -> None:
        """Take a token that does not end it. Raises ConstraintFailed."""
        self.tokens.append(token)
        if self.state is not None:
            self.state.advance(token)
            self.mask = self.state.allowed()

    def end(self, reason: FinishReason) -> None:
        """End it, for another reason than its tokens."""
        self.finish = reason

    def set_answer(self, text: BeamAnswer) -> None:
        """Become an answer of a search that is over."""
        self.tokens += text.token_ids
        self.finish, self.stop_token, self.score = text.finish, text.stop_token, text.score

    # What of it is computed.

    def set_cached(self, tokens: int, blocks: int) -> None:
        """Begin with so many leading tokens that were found in the cache, the keys of their whole blocks too."""
        self.computed = self.sent = tokens
        self.committed = blocks

    def mark_computed(self, end: int) -> None:
        """Note that its first `end` tokens are computed; where its blocks were taken meanwhile, that they are lost."""
        if self.table:
            self.computed = end
        else:
            self.lost_tokens = max(self.lost_tokens, end)

    def commit(self, blocks: int) -> None:
        """Note that its leading blocks have keys."""
        self.committed = blocks

    def mark_length_sent(self) -> None:
        """Note that the block manager is sent how many tokens are computed."""
        self.sent = self.computed

    def fork(self, number: int) -> "Sequence":
        """Return a sequence that goes its own way from here; where this one has blocks, it is to be forked from it."""
        state = self.state and self.state.copy()
        child = Sequence(number, self.group, 0, list(self.tokens), lost_tokens=self.lost_tokens, state=state)
        if self.table:  # else it was preempted, and all beams come back together
            child.parent, child.computed = self, self.computed
        return child

    def set_index(self, index: int) -> None:
        """Take this place among the beams."""
        self.index = index

    def inherit(self, parent: "Sequence") -> None:
        """Have all that its parent has: the Step forks it."""
        self.computed, self.committed, self.sent = parent.computed, parent.committed, parent.sent
        self.parent = None

    def clear_parent(self) -> None:
        """Be forked from no other any more."""
        self.parent = None

    def lose_blocks(self) -> None:
        """Note that its blocks are gone: everything has to be computed again."""
        self.lost_tokens = max(self.lost_tokens, self.computed)
        self.computed = self.committed = self.sent = 0
        self.parent = None


@dataclass(eq=False)
class Group:
    """All samples or beams of a request, and what is counted of them together.

    `aging` is how many seconds later a request counts as come for each level of its class; 0: classes come first.
    `beams` is the state of a search, and `answers` what it found once it is over. `common` counts the leading tokens
    that the trunk computes for all of them before they are forked; `scored` the prompt's leading tokens whose
    log-probabilities are output or, as the first, have none. While it is `isolated`, no other takes part in its steps;
    `isolated_since` is when the first of these was planned.
    """

    id: int
    request: Request
    aging: float = 0.0
    members: list[Sequence] = field(default_factory=list)
    beams: Beams | None = None
    answers: list[Sequence] = field(default_factory=list)
    common: int = 0
    scored: int = 1
    forked: bool = False
    isolated: bool = False
    isolated_since: float | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    failure: Failure | None = None
    detail: str = ""
    fault: Exception | None = None  # what was raised, where that is its failure
    key: OrderKey = field(init=False)
    salt: bytes = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.key = _key(request, self.aging, self.id)
        # A prompt to be scored has to be computed, so it has a salt of its own, which is no text that clients can name.
        self.salt = request.salt if request.prompt_logprobs is None else request.salt + b"\xff%d" % self.id

    @classmethod
    def of(cls, request: Request, numbers: Iterator[int], aging: float = 0.0) -> "Group":
        """Make the group of a request, with what was generated before it came here. Its sequences take `numbers`.

        Raises ConstraintFailed where that is not in the request's language.
        """
        number = next(numbers)
        group = cls(number, request, aging, isolated=request.isolated)
        if request.beam_search:
            group.beams = Beams(request.beam_search, request.stopping)
            group.members = [Sequence(number, group, 0, list(request.prompt))]
        else:
            group.members = [
                Sequence(next(numbers) if index else number, group, index, [*request.prompt, *generated])
                for index, generated in enumerate(request.samples)
            ]
        for index in request.ended:
            group.members[index].end(FinishReason.STOP)
        for member in group.live:
            member.start_constraint()
        group.restart_from_trunk()
        return group

    @property
    def live(self) -> list[Sequence]:
        """The samples that have not ended."""
        return [member for member in self.members if member.finish is None]

    @property
    def ended(self) -> bool:
        """Whether all samples have ended."""
        return all(member.finish is not None for member in self.members)

    @property
    def width(self) -> int:
        """Sequences that it runs, now or once it has branched."""
        return self.beams.width if self.beams else len(self.live)

    @property
    def samples(self) -> list[Sequence]:
        """What was asked for: the samples, or the answers of a search that is over."""
        return self.answers if self.beams else self.members

    @property
    def finish(self) -> FinishReason | None:
        """How the first sample ended, None while it has not."""
        return self.samples[0].finish if self.samples else None

    @property
    def generated(self) -> int:
        """Tokens generated so far, in all samples."""
        return sum(member.generated for member in self.samples)

    def restart_from_trunk(self) -> None:
        """Begin as one sequence: nothing has blocks."""
        live = self.live
        for member in live:
            member.clear_parent()
        self.trunk = live[0]
        self.forked = len(live) == 1 and not self.request.prefill_only
        self.common = len(self.trunk.tokens)
        for other in live[1:]:
            pairs = zip(self.trunk.tokens[: self.common], other.tokens, strict=False)
            self.common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def uncomputed_tokens(self) -> int:
        """Known tokens to compute before all of its sequences decode, those that they have in common counted once."""
        if self.forked:
            behind = (len(member.tokens) - 1 - member.computed for member in self.members if member.finish is None)
            return sum(tokens for tokens in behind if tokens > 0)
        own = sum(len(member.tokens) - self.common for member in self.live)
        return self.common - self.trunk.computed + own

    @property
    def active(self) -> list[Sequence]:
        """The sequences that can go on: all live ones, or the trunk until it has what they have in common.

        None before those that branched are forked.
        """
        if self.forked:
            live = self.live
            return [] if self.beams and any(member.parent for member in live) else live
        return [self.trunk] if self.trunk.computed < self.common else []

    @property
    def blocks(self) -> set[int]:
        """The blocks that it holds, in whichever tier."""
        return {block for member in self.members for block in member.table}

    @property
    def ready_to_fork(self) -> bool:
        """Whether the trunk has all that the samples have in common, and they are not forked yet."""
        return not self.forked and bool(self.trunk.table) and self.trunk.computed >= self.common

    @property
    def trunk_tokens(self) -> list[int]:
        """The tokens that it needs blocks for when it begins."""
        return self.trunk.tokens[: self.common]

    def end_of(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence are known and to be computed by it."""
        return len(sequence.tokens) if self.forked else self.common

    def branch(self, kept: list[Continuation], numbers: Iterator[int]) -> list[Sequence]:
        """Let beams go on; return those that are new. Of the others, those that no beam goes on from are pruned.

        Raises ConstraintFailed.
        """
        parents, taken = self.live, set[int]()
        beams: list[Sequence] = []
        for index, one in enumerate(kept):
            parent = parents[one.parent]
            first = one.parent not in taken
            taken.add(one.parent)
            beams.append(parent if first else parent.fork(next(numbers)))
            beams[-1].set_index(index)
        for beam, one in zip(beams, kept, strict=True):
            beam.continue_with(one.token_id)
        for number, parent in enumerate(parents):
            if number not in taken:
                parent.end(FinishReason.PRUNED)
        self.members = [*beams, *(member for member in self.members if member.finish is not None)]
        return [beam for beam in beams if beam not in parents]

    def answer(self, otherwise: FinishReason, numbers: Iterator[int]) -> None:
        """Make the answers of a search; where it has found too few, or is not over, the rest are empty and so ended."""
        found = self.beams.answers if self.beams and self.beams.done else []
        for index in range(len(self.request.samples)):
            self.answers.append(Sequence(next(numbers), self, index, list(self.request.prompt), finish=otherwise))
        for one, text in zip(self.answers, found, strict=False):
            one.set_answer(text)

    def fork(self) -> list[tuple[Sequence, Sequence]]:
        """Let those that have all in common go their own ways now; return pairs of a parent and what it shares with."""
        if self.ready_to_fork:
            self.forked = True
            return [(self.trunk, child) for child in self.live if child is not self.trunk]
        if self.beams:
            return [(child.parent, child) for child in self.live if child.parent is not None]
        return []

    def drop_sequence(self, sequence: Sequence) -> None:
        """Forget a beam that has ended: samples stay, they are answers."""
        if self.beams and sequence in self.members:
            self.members.remove(sequence)

    def fail(self, failure: Failure, detail: str, fault: Exception | None = None) -> None:
        """Note why it fails. Whatever a search has found by then is dropped."""
        self.failure, self.detail, self.fault = failure, detail, fault
        if self.beams:
            self.beams.abandon()
            self.answers = []

    def count_scored(self, tokens: int) -> None:
        """Note that so many more of the prompt's tokens are scored."""
        self.scored += tokens


def _key(request: Request, aging: float, number: int) -> OrderKey:
    """Smallest is served first, largest is preempted first; kept through preemption.

    Where all requests age at one rate, who is ahead of whom never changes: so there is nothing to sort again. Then all
    are of one class, and each level of their own is worth `aging` seconds.
    """
    if aging:
        return (0, request.arrival + request.priority * aging, number)
    return (request.priority, request.arrival, number)
