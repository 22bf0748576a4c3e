"""Requests as they run: a group of sequences, one for each sample or beam, that share common prefixes.

A group starts as one sequence, its *trunk*, which computes the tokens that all samples have in common once. Then the
other samples are forked from it. A preempted group resumes in the same way. A request with one sample never forks.

The beams of a search start as one sequence too, and branch at each step: the first beam that continues another takes
over its sequence, further ones are forked from it, and a sequence that no beam continues is pruned.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from engine.constraint import ConstraintState
from engine.errors import ConstraintFailed
from engine.schedule.beams import BeamAnswer, Beams, Continuation
from engine.schedule.request import NO_RULES, Failure, FinishReason, OrderKey, Request
from engine.schedule.stats import RequestStats
from engine.schedule.step_plan import RowRules


@dataclass(eq=False)
class Sequence:
    """One sample or beam: its tokens, its blocks, and how much of it is computed.

    `PoolView` writes `table`, those in window kinds, `room` (tokens that fit) and `swapped` (to the host tier).
    `Releases` writes `release_pending` (the next block step frees the blocks).

    `computed` counts tokens whose K and V are in the cache, `committed` the leading blocks that have keys, and `sent`
    the computed tokens last reported to the block manager. `lost_tokens` counts tokens computed before a preemption.

    The next block step forks the sequence from `parent`. `score` belongs to an answer of a beam search. `state` is the
    state of the constraint, and `mask` the tokens that it allows next.
    """

    id: int
    group: "Group"
    index: int
    tokens: list[int]
    table: tuple[int, ...] = ()
    window_tables: tuple[tuple[int, ...], ...] = ()
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
        """The request of its group."""
        return self.group.request

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - len(self.group.request.prompt)

    @property
    def uncomputed_tokens(self) -> int:
        """Known tokens that are not computed: 1 while decoding, more during prefill."""
        return self.group.end_of(self) - self.computed

    @property
    def lacks_room(self) -> bool:
        """Whether no answer of the block manager has granted room for its next token."""
        return self.computed >= self.room

    @property
    def schedulable_tokens(self) -> int:
        """Number of tokens that can be scheduled next.

        Beams compute their last tokens together, so a beam that prefills leaves its last token.
        """
        group, uncomputed = self.group, self.uncomputed_tokens
        behind = group.beams is not None and len(group.live) > 1 and group.forked and uncomputed > 1
        return uncomputed - behind

    @property
    def max_slots(self) -> int:
        """Most slots it can need before it is forked or ends. The last generated token is never fed back."""
        if not self.group.forked:
            return self.group.common
        return self.group.request.longest - 1

    def rules_at(self, end: int, tokens: list[int] | None = None, *, counted: bool = False) -> RowRules | None:
        """Return the rules after its first `end` tokens, or those of `tokens`. `counted`: penalties need no tokens."""
        request = self.group.request
        if not request.has_rules:
            return None
        length = len(request.prompt)
        rules, banned = request.logit_rules, request.stopping.banned_after(end - length)
        if rules.bad_words.sequences:
            banned |= rules.bad_words.banned_after(tokens or self.tokens, length, end)
        if rules.penalizes and not counted:
            return RowRules(rules, request.prompt, tuple((tokens or self.tokens)[length:end]), banned, self.mask)
        if banned or self.mask or rules != NO_RULES:
            return RowRules(rules, banned_token_ids=banned, mask=self.mask)
        return None

    # Tokens.

    def start_constraint(self) -> None:
        """Advance the constraint over earlier tokens. Raises ConstraintFailed, also if no token may follow."""
        if constraint := self.request.constraint:
            self.state = constraint.start()
            for token in self.tokens[len(self.request.prompt) :]:
                self.state.advance(token)
            self.mask = self.state.allowed()
            if self.generated and self.state.complete:
                raise ConstraintFailed("the output is complete, so its sample has ended")

    def append(self, token: int) -> None:
        """Append a sampled token and finish the sequence if the token ends it. Raises ConstraintFailed."""
        request = self.group.request
        if token in request.stopping.token_ids:
            self.tokens.append(token)
            self.finish, self.stop_token = FinishReason.STOP, token
            return
        self.continue_with(token)
        if self.state is not None and self.state.complete:
            self.finish = FinishReason.STOP
        elif len(self.tokens) >= request.longest:
            self.finish = FinishReason.LENGTH

    def continue_with(self, token: int) -> None:
        """Append a token that does not end it. Raises ConstraintFailed."""
        self.tokens.append(token)
        if self.state is not None:
            self.state.advance(token)
            self.mask = self.state.allowed()

    def end(self, reason: FinishReason) -> None:
        """End it for a reason other than its tokens."""
        self.finish = reason

    def set_answer(self, text: BeamAnswer) -> None:
        """Turn into an answer of a finished search."""
        self.tokens += text.token_ids
        self.finish, self.stop_token, self.score = text.finish, text.stop_token, text.score

    # Computed tokens.

    def set_cached(self, tokens: int, blocks: int) -> None:
        """Start with `tokens` computed tokens and `blocks` committed blocks from a prefix cache hit."""
        self.computed = self.sent = tokens
        self.committed = blocks

    def mark_computed(self, end: int) -> None:
        """Record that its first `end` tokens are computed, or lost if its blocks were taken meanwhile."""
        if self.table:
            self.computed = end
        else:
            self.lost_tokens = max(self.lost_tokens, end)

    def commit(self, blocks: int) -> None:
        """Record that its first `blocks` blocks have keys."""
        self.committed = blocks

    def mark_length_sent(self) -> None:
        """Record that the number of computed tokens is reported to the block manager."""
        self.sent = self.computed

    def fork(self, number: int) -> "Sequence":
        """Return a copy that continues independently; the next block step forks it if this sequence has blocks."""
        state = self.state and self.state.copy()
        child = Sequence(number, self.group, 0, list(self.tokens), lost_tokens=self.lost_tokens, state=state)
        if self.table:  # else it was preempted, and all beams are recomputed together
            child.parent, child.computed = self, self.computed
        return child

    def set_index(self, index: int) -> None:
        """Set its index among the beams."""
        self.index = index

    def inherit(self, parent: "Sequence") -> None:
        """Take over the computed state of its parent when the block step forks it."""
        self.computed, self.committed, self.sent = parent.computed, parent.committed, parent.sent
        self.parent = None

    def clear_parent(self) -> None:
        """Cancel a pending fork."""
        self.parent = None

    def lose_blocks(self) -> None:
        """Record that its blocks are freed, so that all tokens must be recomputed."""
        self.lost_tokens = max(self.lost_tokens, self.computed)
        self.computed = self.committed = self.sent = 0
        self.parent = None


@dataclass(eq=False)
class Group:
    """All samples or beams of a request, and their statistics.

    `aging` is the number of seconds by which each priority level delays the arrival; 0 orders by priority first.
    `beams` is the state of a search, and `answers` its result. `common` counts the leading tokens that the trunk
    computes for all samples, before the fork or the end. `scored` counts the leading prompt tokens whose
    log-probabilities are output; the first token has none. `links` identify blocks of its prompt, see `PrefixClaims`.
    While `isolated`, no other group takes part in its steps; `isolated_since` is the time of the first of these, and
    `start_taken` whether its Started was taken for delivery, before which it has none: see `engine.schedule.isolation`.
    """

    id: int
    request: Request
    aging: float = 0.0
    members: list[Sequence] = field(default_factory=list)
    beams: Beams | None = None
    answers: list[Sequence] = field(default_factory=list)
    common: int = 0
    scored: int = 1
    links: list[int] | None = None
    forked: bool = False
    isolated: bool = False
    isolated_since: float | None = None
    start_taken: bool = False
    stats: RequestStats = field(default_factory=RequestStats)
    failure: Failure | None = None
    detail: str = ""
    fault: Exception | None = None  # the exception, if the request failed by one
    key: OrderKey = field(init=False)
    salt: bytes = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.key = _key(request, self.aging, self.id)
        # A scored prompt must be computed, so it gets a unique salt that no client can send: \xff is not UTF-8.
        self.salt = request.salt if request.prompt_logprobs is None else request.salt + b"\xff%d" % self.id

    @classmethod
    def of(cls, request: Request, numbers: Iterator[int], aging: float = 0.0) -> "Group":
        """Create the group of a request, including tokens generated before. Sequences take ids from `numbers`.

        Raises ConstraintFailed if these tokens violate the constraint.
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
        """Samples that have not ended."""
        return [member for member in self.members if member.finish is None]

    @property
    def ended(self) -> bool:
        """Whether all samples have ended."""
        return None not in [member.finish for member in self.members]

    @property
    def width(self) -> int:
        """Number of sequences it runs, now or after it has branched."""
        if self.beams:
            return self.beams.width
        return len(self.live) if self.request.generates else 1

    @property
    def samples(self) -> list[Sequence]:
        """The samples, or the answers of a finished search."""
        return self.answers if self.beams else self.members

    @property
    def finish(self) -> FinishReason | None:
        """Finish reason of the first sample, None while it runs."""
        return self.samples[0].finish if self.samples else None

    @property
    def generated(self) -> int:
        """Number of generated tokens in all samples."""
        return sum(member.generated for member in self.samples)

    def restart_from_trunk(self) -> None:
        """Return to a single unforked sequence: no member has blocks."""
        live = self.live
        for member in live:
            member.clear_parent()
        self.trunk = live[0]
        self.forked = len(live) == 1 and self.request.generates
        self.common = len(self.trunk.tokens) if self.request.generates else self.request.prompt_slots
        for other in live[1:]:
            pairs = zip(self.trunk.tokens[: self.common], other.tokens, strict=False)
            self.common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def uncomputed_tokens(self) -> int:
        """Known tokens to compute before all sequences decode; common tokens count once."""
        if self.forked:
            uncomputed = 0
            for member in self.members:  # a plain loop, because it runs for every group after every step
                behind = len(member.tokens) - 1 - member.computed
                if behind > 0 and member.finish is None:
                    uncomputed += behind
            return uncomputed
        own = [len(member.tokens) - self.common for member in self.live] if self.request.generates else ()
        return self.common - self.trunk.computed + sum(own)

    @property
    def active(self) -> list[Sequence]:
        """Sequences that can be scheduled: the trunk until the common tokens are computed, then all that are forked."""
        if self.forked:
            live = self.live
            return [] if self.beams and any(member.parent for member in live) else live
        return [self.trunk] if self.trunk.computed < self.common else []

    @property
    def blocks(self) -> set[int]:
        """Blocks that it holds, in either tier."""
        return {block for member in self.members for block in member.table}

    @property
    def ready_to_fork(self) -> bool:
        """Whether the trunk has computed the common tokens and the samples are not forked yet."""
        return not self.forked and bool(self.trunk.table) and self.trunk.computed >= self.common

    @property
    def trunk_tokens(self) -> list[int]:
        """Tokens that the first allocation covers."""
        return self.trunk.tokens[: self.common]

    def end_of(self, sequence: Sequence) -> int:
        """Return the number of known tokens that a sequence computes."""
        return len(sequence.tokens) if self.forked else self.common

    def branch(self, kept: list[Continuation], numbers: Iterator[int]) -> list[Sequence]:
        """Continue with the kept beams; return the new sequences. Sequences that no beam continues are pruned.

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
        """Create the answers of a search. Missing answers are empty and end with `otherwise`."""
        found = self.beams.answers if self.beams and self.beams.done else []
        for index in range(len(self.request.samples)):
            self.answers.append(Sequence(next(numbers), self, index, list(self.request.prompt), finish=otherwise))
        for one, text in zip(self.answers, found, strict=False):
            one.set_answer(text)

    def fork(self) -> list[tuple[Sequence, Sequence]]:
        """Fork the sequences that are ready; return pairs of parent and child."""
        if self.ready_to_fork:
            self.forked = True
            return [(self.trunk, child) for child in self.live if child is not self.trunk]
        if self.beams:
            return [(child.parent, child) for child in self.live if child.parent is not None]
        return []

    def drop_sequence(self, sequence: Sequence) -> None:
        """Remove an ended beam. Samples stay, because they are answers."""
        if self.beams and sequence in self.members:
            self.members.remove(sequence)

    def fail(self, failure: Failure, detail: str, fault: Exception | None = None) -> None:
        """Record the failure and discard the answers of a search."""
        self.failure, self.detail, self.fault = failure, detail, fault
        if self.beams:
            self.beams.abandon()
            self.answers = []

    # Isolation.

    def mark_start_taken(self) -> None:
        """Record that its Started was taken for delivery."""
        self.start_taken = True

    def begin_isolation(self, now: float) -> None:
        """Record its first step alone, if this is the first one."""
        if self.isolated_since is None:
            self.isolated_since = now

    def end_isolation_after(self, seconds: float, now: float) -> None:
        """End the isolation if it has lasted for some seconds."""
        if self.isolated_since is not None and now - self.isolated_since >= seconds:
            self.isolated = False

    def end_isolation_at_token(self) -> None:
        """End the isolation at the first token; a beam search stays isolated until its end."""
        self.isolated = self.beams is not None

    def count_scored(self, tokens: int) -> None:
        """Record that `tokens` more prompt tokens are scored."""
        self.scored += tokens


def _key(request: Request, aging: float, number: int) -> OrderKey:
    """Return the order key: the smallest is served first, the largest is preempted first. Kept through preemption.

    With a common aging rate the order of two requests never changes, so lists stay sorted. Then all requests are in one
    class, and each priority level delays the arrival by `aging` seconds.
    """
    if aging:
        return (0, request.arrival + request.priority * aging, number)
    return (request.priority, request.arrival, number)
