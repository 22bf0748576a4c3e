"""The work of a step: which sequences take part, from which position, with how many tokens of the budget.

A step can be planned while the previous one is in flight. Then each sequence starts where that step ends, and the token
it samples is pending.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from engine.schedule.sequence_group import Group, Sequence
from engine.schedule.step_plan import PENDING_TOKEN, PromptPart, Work


class Cursor(NamedTuple):
    """The position of a sequence before a step: `start` tokens are computed, `remaining` tokens can be scheduled.

    `pending`: the remaining token is being sampled by the step in flight.
    """

    sequence: Sequence
    start: int
    remaining: int
    pending: bool = False

    @property
    def prefilling(self) -> bool:
        """Whether more than the last token is not computed."""
        return not self.pending and self.sequence.group.end_of(self.sequence) - self.start > 1

    @property
    def lacks_room(self) -> bool:
        """Whether no answer of the block manager has granted room for its next token."""
        return self.start >= self.sequence.room


def decoding_alone(group: Group) -> Sequence | None:
    """Return the only sequence of a group, as nearly all have one, if just its last token is not computed."""
    members = group.members
    if len(members) == 1 and group.forked and group.beams is None:
        sequence = members[0]
        if len(sequence.tokens) - sequence.computed == 1:
            return sequence
    return None


def decoding_work(sequence: Sequence) -> Work:
    """Return the work that computes the last token of a `decoding_alone` sequence."""
    request, end = sequence.group.request, len(sequence.tokens)
    return Work(
        sequence.id,
        (sequence.tokens[-1],),
        sequence.computed,
        sequence.table,
        True,
        request.sampling,
        (sequence.index,),
        sequence.rules_at(end) if request.has_rules else None,
        request.logprobs,
        window_tables=sequence.window_tables,
    )


def work_after(sequence: Sequence, before: Work) -> Work:
    """Return the work that computes the token which `before`, in flight, samples for a sequence that is alone."""
    request, start = sequence.group.request, before.start + len(before.token_ids)
    return Work(
        before.sequence,
        PENDING_TOKEN,
        start,
        sequence.table,
        True,
        before.sampling,
        before.sample_indices,
        sequence.rules_at(start + 1, counted=True) if request.has_rules else None,
        before.logprobs,
        window_tables=sequence.window_tables,
    )


def awaits_results(group: Group, in_flight: Mapping[int, Work], *, counts_tokens: bool) -> bool:
    """Return whether the next work of a group depends on results of its work in flight, beyond the token itself.

    `counts_tokens`: the sampler counts the tokens for penalties.
    """
    request = group.request
    runs_ahead = request.runs_ahead and (counts_tokens or not request.logit_rules.penalizes)
    if runs_ahead and request.prompt_logprobs is None:
        return False
    works = [in_flight[member.id] for member in group.members if member.id in in_flight]
    if group.beams or any(work.to_score for work in works):
        return bool(works)
    return not runs_ahead and any(work.samples for work in works)


def list_gangs(running: Iterable[Group], in_flight: Mapping[int, Work]) -> tuple[list[list[Cursor]], list[Cursor]]:
    """Return the decoding samples, with those of a group, which must be scheduled together; and the prompts in prefill.

    `in_flight` is the work of the step in flight, by sequence.
    """
    decoding: list[list[Cursor]] = []
    prompts: list[Cursor] = []
    for group in running:
        cursors = _cursors(group, in_flight)
        prefilling = [cursor for cursor in cursors if cursor.prefilling]
        if prefilling:
            prompts += prefilling
        elif cursors:
            decoding.append(cursors)
    return decoding, prompts


def token_counts(gang: list[Cursor], budget: int) -> list[int]:
    """Return the number of tokens scheduled for each cursor of a gang, empty if not all fit."""
    if len(gang) == 1:  # nearly all gangs
        sequence, start, remaining, _ = gang[0]
        most = min(budget, remaining, sequence.room - start)
        return [most] if most > 0 else []
    found = [min(budget, cursor.remaining, cursor.sequence.room - cursor.start) for cursor in gang]
    return found if budget >= len(gang) and min(found) > 0 else []


def can_compute(groups: Iterable[Group], budget: int) -> bool:
    """Return whether the next step of these groups would compute a token."""
    gangs, prompts = list_gangs(groups, {})
    return any(token_counts(gang, budget) for gang in [*gangs, *([cursor] for cursor in prompts)])


def work_of(cursor: Cursor, count: int) -> Work:
    """Return the work that schedules `count` tokens of a sequence."""
    sequence, end = cursor.sequence, cursor.start + count
    group = sequence.group
    indices = (sequence.index,) if cursor.pending else _sampled_by(sequence, end)
    # All these samples have the same tokens up to `end`; the trunk may have more.
    sampled = group.members[indices[0]] if indices and not cursor.pending else sequence
    request = group.request
    return Work(
        sequence=sequence.id,
        token_ids=PENDING_TOKEN if cursor.pending else tuple(sequence.tokens[cursor.start : end]),
        start=cursor.start,
        block_table=sequence.table,
        samples=bool(indices),
        sampling=request.sampling,
        sample_indices=indices,
        rules=sampled.rules_at(end, counted=cursor.pending) if indices else None,
        logprobs=request.logprobs,
        to_score=_to_score(group, end),
        candidates=group.beams.candidates if group.beams else 0,
        window_tables=sequence.window_tables,
    )


def _to_score(group: Group, end: int) -> PromptPart | None:
    """Return the unscored prompt tokens that can be scored once the first `end` tokens are computed."""
    request, scored = group.request, group.scored
    if request.prompt_logprobs is None or not (token_ids := request.prompt[scored : end + 1]):
        return None
    return PromptPart(scored, token_ids, request.prompt_logprobs)


def _sampled_by(sequence: Sequence, end: int) -> tuple[int, ...]:
    """Return the indices of the samples that receive a token after the first `end` tokens of a sequence."""
    group = sequence.group
    if group.forked:
        return (sequence.index,) if end == len(sequence.tokens) else ()
    if end < group.common or not group.request.generates:
        return ()
    return tuple(member.index for member in group.live if len(member.tokens) == end)


def _cursors(group: Group, in_flight: Mapping[int, Work]) -> list[Cursor]:
    cursors = [_cursor(sequence, in_flight.get(sequence.id)) for sequence in group.active]
    return [cursor for cursor in cursors if cursor is not None and cursor.remaining > 0]


def _cursor(sequence: Sequence, work: Work | None) -> Cursor | None:
    if work is None:
        return Cursor(sequence, sequence.computed, sequence.schedulable_tokens)
    if not work.samples:
        return Cursor(sequence, work.end, sequence.group.end_of(sequence) - work.end)
    last = sequence.generated + 1 >= sequence.request.stopping.max_tokens
    if last or not sequence.group.forked:  # it ends there, or is forked first
        return None
    return Cursor(sequence, work.end, 1, pending=True)
