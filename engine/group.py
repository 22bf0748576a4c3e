"""Requests as they run: a group of sequences, one for each sample, that share what they have in common.

A group begins as one sequence, its *trunk*: the tokens that all samples have in common are computed once, through the
trunk's blocks. Then the others are forked from it, and from there on each goes its own way. A preempted group comes
back the same way. A request of one sample is a group that needs no fork.
"""

from dataclasses import dataclass, field
from itertools import takewhile

from engine.plan import PromptPart, RowRules
from engine.request import NO_RULES, Failure, FinishReason, OrderKey, Request


@dataclass(eq=False)
class Sequence:
    """One sample on its way: its tokens, and the engine's own copy of its block table.

    `computed` counts the tokens whose K and V are in the cache, seen to be written; `room` those that its blocks can
    take; `committed` the leading blocks that have keys; `told` the computed tokens that the block manager knows of.
    `leaving` says that its blocks will be given back with the next Step; `swapped` that they are host blocks.
    """

    id: int
    group: "Group"
    index: int
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    room: int = 0
    computed: int = 0
    committed: int = 0
    told: int = 0
    lost_tokens: int = 0
    leaving: bool = False
    swapped: bool = False
    finish: FinishReason | None = None
    stop_token: int | None = None

    @property
    def request(self) -> Request:
        """The request that it is a sample of."""
        return self.group.request

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens that are known but not computed: 1 while decoding, more while a prompt is prefilled."""
        return self.group.end_of(self) - self.computed

    @property
    def most_slots(self) -> int:
        """Slots it can need at most before it is forked or ends: the last token generated is never fed back."""
        if not self.group.forked:
            return self.group.common
        return len(self.request.prompt) + self.request.stopping.max_tokens - 1

    def rules_after(self, end: int) -> RowRules | None:
        """Return what changes the logits after its first `end` tokens, None where nothing does."""
        request, length = self.request, len(self.request.prompt)
        rules, barred = request.logit_rules, request.stopping.barred_after(end - length)
        if rules.penalizes:
            return RowRules(rules, request.prompt, tuple(self.tokens[length:end]), barred)
        return RowRules(rules, barred_token_ids=barred) if barred or rules != NO_RULES else None

    def append(self, token: int) -> None:
        """Take a sampled token, and finish where it ends the sequence."""
        self.tokens.append(token)
        stopping = self.request.stopping
        if token in stopping.token_ids:
            self.finish, self.stop_token = FinishReason.STOP, token
        elif self.generated >= stopping.max_tokens:
            self.finish = FinishReason.LENGTH

    def lose_blocks(self) -> None:
        """Forget the table: everything has to be computed again."""
        self.lost_tokens = max(self.lost_tokens, self.computed)
        self.table = []
        self.room = self.computed = self.committed = self.told = 0
        self.leaving = self.swapped = False


@dataclass(eq=False)
class Group:
    """All samples of a request, and what is counted of them together.

    `aging` is how many seconds later a request counts as come for each level of its class; 0: classes come first.
    `common` counts the leading tokens that the trunk computes for all of them before they are forked; `scored` the
    prompt's leading tokens whose log-probabilities are told or, as the first, have none.
    """

    id: int
    request: Request
    aging: float = 0.0
    members: list[Sequence] = field(default_factory=list)
    common: int = 0
    scored: int = 1
    forked: bool = False
    started: bool = False
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_tokens: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    failure: Failure | None = None
    detail: str = ""

    @classmethod
    def of(cls, number: int, request: Request, aging: float = 0.0) -> "Group":
        """Make the group of a request, with what was generated before it came here. Its sequences count from number."""
        group = cls(number, request, aging)
        group.members = [
            Sequence(number + index, group, index, [*request.prompt, *generated])
            for index, generated in enumerate(request.samples)
        ]
        group.gather()
        return group

    @property
    def key(self) -> OrderKey:
        """Smallest is served first, largest is preempted first; kept through preemption.

        Where all requests age at one rate, who is ahead of whom never changes: so there is nothing to sort again. Then
        all are of one class, and each level of their own is worth `aging` seconds.
        """
        request = self.request
        if self.aging:
            return (0, request.arrival + request.priority * self.aging, self.id)
        return (request.priority, request.arrival, self.id)

    @property
    def salt(self) -> bytes:
        """What the keys of its blocks begin with.

        A prompt to be scored has to be computed, so it has a salt of its own, which no client can name: it is no text.
        """
        request = self.request
        return request.salt if request.prompt_logprobs is None else request.salt + b"\xff%d" % self.id

    @property
    def live(self) -> list[Sequence]:
        """The samples that have not ended."""
        return [member for member in self.members if member.finish is None]

    @property
    def ended(self) -> bool:
        """Whether all samples have ended."""
        return all(member.finish is not None for member in self.members)

    @property
    def finish(self) -> FinishReason | None:
        """How the first sample ended, None while it has not."""
        return self.members[0].finish

    @property
    def tokens(self) -> list[int]:
        """The tokens of the first sample, its prompt included."""
        return self.members[0].tokens

    @property
    def generated(self) -> int:
        """Tokens generated so far, in all samples."""
        return sum(member.generated for member in self.members)

    def gather(self) -> None:
        """Begin as one sequence: nothing has blocks."""
        live = self.live
        self.trunk = live[0]
        self.forked = len(live) == 1 and not self.request.prefill_only
        self.common = len(self.trunk.tokens)
        for other in live[1:]:
            pairs = zip(self.trunk.tokens[: self.common], other.tokens, strict=False)
            self.common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def active(self) -> list[Sequence]:
        """The sequences that can go on: all live ones, or the trunk until it has what they have in common."""
        if self.forked:
            return self.live
        return [self.trunk] if self.trunk.computed < self.common else []

    @property
    def swapped(self) -> bool:
        """Whether its blocks are in host memory."""
        return any(member.swapped for member in self.members)

    @property
    def blocks(self) -> set[int]:
        """The blocks that it holds, in whichever tier."""
        return {block for member in self.members for block in member.table}

    @property
    def to_fork(self) -> bool:
        """Whether the trunk has all that the samples have in common, and they are not forked yet."""
        return not self.forked and bool(self.trunk.table) and self.trunk.computed >= self.common

    @property
    def beginning(self) -> list[int]:
        """The tokens that it needs blocks for when it begins."""
        return self.trunk.tokens[: self.common]

    def end_of(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence are known and to be computed by it."""
        return len(sequence.tokens) if self.forked else self.common

    def to_score(self, end: int) -> PromptPart | None:
        """Return the prompt tokens that can be scored, and are not yet, once the first `end` tokens are computed."""
        request = self.request
        if request.prompt_logprobs is None or not (token_ids := request.prompt[self.scored : end + 1]):
            return None
        return PromptPart(self.scored, token_ids, request.prompt_logprobs)

    def sampled_by(self, sequence: Sequence, end: int) -> tuple[int, ...]:
        """Return the indices of the samples that get a token from position `end` of a sequence."""
        if self.forked:
            return (sequence.index,) if end == len(sequence.tokens) else ()
        if end < self.common or self.request.prefill_only:
            return ()
        return tuple(member.index for member in self.live if len(member.tokens) == end)
