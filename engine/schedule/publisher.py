"""Processes the results of a step: lengths, scores, tokens and ended requests."""

from collections.abc import Iterable, Iterator
from itertools import islice

from blocks import FreeReason
from engine.schedule.endings import RequestEndings
from engine.schedule.outputs import Outputs, Scored, Tokens
from engine.schedule.pool.releases import Releases
from engine.schedule.request import FinishReason
from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group, Sequence
from engine.schedule.speculation.speculator import Speculator
from engine.schedule.step_plan import Sampled, StepPlan, Work


class Publisher:
    """Processes step results. An exception raised for one request ends at most that request."""

    def __init__(
        self,
        queue: RequestQueue,
        releases: Releases,
        endings: RequestEndings,
        outputs: Outputs,
        speculator: Speculator | None = None,
    ) -> None:
        self._queue = queue
        self._releases = releases
        self._endings = endings
        self._outputs = outputs
        self._speculator = speculator

    def publish(self, plan: StepPlan, results: list[Sampled], now: float) -> None:
        """Process the results of a step."""
        sampled = iter(results)
        found: dict[Group, list[Sampled]] = {}
        computed = recomputed = 0
        for work in plan.work:
            sequence = self._queue.sequence(work.sequence)
            if work.proposed:
                computed += self._take_proposed(sequence, work, list(islice(sampled, work.outcomes)), now)
                continue
            if sequence.lost_tokens:
                recomputed += _count_recomputed(sequence, work)
            fed = len(work.token_ids)
            computed += fed
            sequence.mark_computed(work.start + fed)
            group = sequence.group
            if work.samples and len(group.members) == 1 and not (work.to_score or group.beams):  # nearly all work
                try:
                    self._take_only_token(group, sequence, next(sampled), now)
                except Exception as fault:
                    self._endings.record_fault(group, fault)
            elif beams := self._take_outcomes(group, work, sampled, now):
                found.setdefault(group, []).extend(beams)
        self._queue.totals.count_computed(computed, recomputed)
        for group, continuations in found.items():
            try:
                self._advance_beams(group, continuations, now)
            except Exception as fault:
                self._endings.record_fault(group, fault)
        self._endings.fail_faulty()

    def _take_outcomes(self, group: Group, work: Work, sampled: Iterator[Sampled], now: float) -> list[Sampled]:
        """Take the scores and tokens of any work; return the candidates of a beam instead."""
        scores = list(islice(sampled, len(work.to_score.token_ids))) if work.to_score else []
        tokens = list(islice(sampled, len(work.sample_indices))) if work.samples else []
        try:
            if scores:
                self._take_scores(group, scores)
            if group.beams:
                return tokens
            if work.end >= group.common and not group.request.stopping.max_tokens:
                self._endings.end(group, FinishReason.LENGTH)
            else:
                self._take_tokens(group, zip(work.sample_indices, tokens, strict=False), now)
        except Exception as fault:
            self._endings.record_fault(group, fault)
        return []

    def _take_scores(self, group: Group, scores: list[Sampled]) -> None:
        _check_faults(scores)
        self._outputs.emit(Scored(group.request.request_id, group.scored, scores))
        group.count_scored(len(scores))

    def _take_proposed(self, sequence: Sequence, work: Work, results: list[Sampled], now: float) -> int:
        """Take the tokens that hold of a work with proposals; return how many of its tokens are computed."""
        assert self._speculator is not None, "the speculator has proposed tokens"
        accepted = _count_accepted(work, results)
        self._speculator.count(work, accepted)
        sequence.mark_computed(work.least_end)
        try:
            self._take_verified(sequence, results[: accepted + 1], now)
        except Exception as fault:
            self._endings.record_fault(sequence.group, fault)
        return accepted + 1

    def _take_verified(self, sequence: Sequence, verified: list[Sampled], now: float) -> None:
        """Take tokens of one step up to the one that ends the sequence. All but the last are computed."""
        if verified[0].fault is not None:
            raise verified[0].fault
        group, taken = sequence.group, 0
        while taken < len(verified) and sequence.finish is None:
            sequence.append(verified[taken].token_id)
            taken += 1
        sequence.mark_computed(len(sequence.tokens) - 1)
        self._count_generated(group, taken, now)
        end = None if sequence.finish is None else sequence
        self._outputs.emit(Tokens(group.request.request_id, verified[:taken], sequence.index, end))
        if end is not None:
            self._endings.release_sample(end)
        self._close_or_restart(group)

    def _take_only_token(self, group: Group, sequence: Sequence, token: Sampled, now: float) -> None:
        """Do what `_take_tokens` does for one token of a group of one sequence."""
        if token.fault is not None:
            raise token.fault
        self._count_generated(group, 1, now)
        sequence.append(token.token_id)
        if sequence.finish is not None:
            self._outputs.emit(Tokens(group.request.request_id, [token], sequence.index, sequence))
            self._endings.close(group)
            return
        self._outputs.emit(Tokens(group.request.request_id, [token], sequence.index))
        if not sequence.table:
            group.restart_from_trunk()

    def _take_tokens(self, group: Group, tokens: Iterable[tuple[int, Sampled]], now: float) -> None:
        for index, token in tokens:
            member = group.members[index]
            if token.fault is not None:
                raise token.fault
            self._count_generated(group, 1, now)
            member.append(token.token_id)
            end = None if member.finish is None else member
            self._outputs.emit(Tokens(group.request.request_id, [token], index, end))
            if end is not None:
                self._endings.release_sample(end)
        self._close_or_restart(group)

    def _close_or_restart(self, group: Group) -> None:
        if group.ended:
            self._endings.close(group)
        elif not any(member.table for member in group.members):
            group.restart_from_trunk()  # preempted while the step ran; these tokens are recomputed too

    def _count_generated(self, group: Group, tokens: int, now: float) -> None:
        self._queue.totals.count_generated(tokens)
        if group.isolated:
            group.end_isolation_at_token()
        group.stats.count_token(now)

    def _advance_beams(self, group: Group, found: list[Sampled], now: float) -> None:
        assert group.beams, "the group is a beam search"
        _check_faults(found)
        self._count_generated(group, len(found), now)
        texts = [beam.tokens[len(group.request.prompt) :] for beam in group.live]
        kept = group.beams.advance(texts, [one.top for one in found])
        if group.beams.done:
            self._publish_answers(group)
            return
        self._queue.add_sequences(group.branch(kept, self._queue.sequence_ids))
        self._releases.release([one for one in group.members if one.finish is not None], FreeReason.PRUNED)
        if not any(beam.table for beam in group.live):
            group.restart_from_trunk()  # preempted while the step ran; these beams are recomputed

    def _publish_answers(self, group: Group) -> None:
        group.answer(FinishReason.STOP, self._queue.sequence_ids)
        for answer in group.answers:
            tokens = [Sampled(token) for token in answer.tokens[len(group.request.prompt) :]]
            self._outputs.emit(Tokens(group.request.request_id, tokens, answer.index, answer))
        self._endings.end(group, FinishReason.STOP)


def _count_recomputed(sequence: Sequence, work: Work) -> int:
    recomputed = min(work.end, sequence.lost_tokens) - work.start
    if recomputed <= 0:
        return 0
    sequence.group.stats.count_recomputed(recomputed)
    return recomputed


def _count_accepted(work: Work, results: list[Sampled]) -> int:
    """Return how many proposed tokens equal the samples at their positions; none behind which sampling failed."""
    accepted = 0
    while accepted < work.proposed:
        refused = results[accepted].token_id != work.token_ids[accepted + 1]
        if refused or results[accepted + 1].fault is not None:
            break
        accepted += 1
    return accepted


def _check_faults(results: Iterable[Sampled]) -> None:
    for one in results:
        if one.fault is not None:
            raise one.fault
