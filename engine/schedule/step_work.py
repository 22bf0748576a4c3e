"""What takes part in a step: who can be fed, from where on, and how many tokens each gets of the step's budget.

A step can be laid out while the one before it is under way and has not told its tokens: then each sequence stands where
that leaves it, and the token that is sampled meanwhile is pending.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from blocks import blocks_for
from engine.schedule.sequence_group import Group, Sequence
from engine.schedule.step_plan import PENDING, Work


class Place(NamedTuple):
    """Where a sequence is when a step begins: what is below `start` is computed, and `left` tokens can be fed.

    `pending` says that the one token left is not known yet.
    """

    sequence: Sequence
    start: int
    left: int
    pending: bool = False

    @property
    def behind(self) -> bool:
        """Whether more than its last token is not computed: it prefills."""
        return not self.pending and self.sequence.group.end_of(self.sequence) - self.start > 1


def gangs(running: Iterable[Group], under_way: Mapping[int, Work]) -> list[list[Place]]:
    """List what takes part in a step together: the samples of a group that decode, then prompts one by one.

    `under_way` is the work of the step before, by sequence, where that has not told its tokens.
    """
    decoding: list[list[Place]] = []
    prompts: list[list[Place]] = []
    for group in running:
        places = _places(group, under_way)
        behind = [place for place in places if place.behind]
        if behind:
            prompts += ([place] for place in behind)
        elif places:
            decoding.append(places)
    return [*decoding, *prompts]


def counts(gang: list[Place], budget: int) -> list[int]:
    """Return how many tokens each of a gang is fed, none where not all of them can take part."""
    found = [min(budget, place.left, place.sequence.room - place.start) for place in gang]
    return found if budget >= len(gang) and min(found) > 0 else []


def work_of(place: Place, count: int, block_size: int) -> Work:
    """Return what a step does for a sequence that it feeds `count` tokens."""
    sequence, end = place.sequence, place.start + count
    group = sequence.group
    indices = (sequence.index,) if place.pending else group.sampled_by(sequence, end)
    # The samples have the same tokens up to there, but the trunk may know more of its own.
    sampled = group.members[indices[0]] if indices and not place.pending else sequence
    return Work(
        sequence=sequence.id,
        token_ids=(PENDING,) if place.pending else tuple(sequence.tokens[place.start : end]),
        start=place.start,
        block_table=tuple(sequence.table[: blocks_for(end, block_size)]),
        samples=bool(indices),
        sampling=sequence.request.sampling,
        sample_indices=indices,
        rules=sampled.rules_after(end) if indices else None,
        logprobs=sequence.request.logprobs,
        to_score=group.to_score(end),
        candidates=group.beams.candidates if group.beams else 0,
    )


def goes_blind(group: Group) -> bool:
    """Return whether a group's next work can be told before its last token is known."""
    request = group.request
    depends = request.constraint or request.logit_rules.penalizes or request.beam_search
    return not depends and request.logprobs is None and request.prompt_logprobs is None


def _places(group: Group, under_way: Mapping[int, Work]) -> list[Place]:
    """Return where the active sequences of a group are, those that can be fed."""
    places = (_place(sequence, under_way.get(sequence.id)) for sequence in group.active)
    return [place for place in places if place is not None and place.left > 0]


def _place(sequence: Sequence, work: Work | None) -> Place | None:
    if work is None:
        return Place(sequence, sequence.computed, sequence.feedable)
    if not work.samples:
        return Place(sequence, work.end, sequence.group.end_of(sequence) - work.end)
    last = sequence.generated + 1 >= sequence.request.stopping.max_tokens
    if last or not sequence.group.forked:  # it ends there, or others are forked from it first
        return None
    return Place(sequence, work.end, 1, pending=True)
