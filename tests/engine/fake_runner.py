"""A model without tensors: its next token is a function of the contents of the blocks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from blocks import Copy
from engine.schedule.request import BeamSearch
from engine.schedule.step_plan import PENDING, Done, Launched, Sampled, StepPlan, Work
from tests.engine_in_process import MadeToFail

_NOTHING = -1
_SCORES = 10**6


@dataclass(frozen=True)
class FailedLater:
    """A step whose failure is raised by its result."""

    failure: Exception

    def result(self) -> list[Sampled]:
        raise self.failure

    def sample_seconds(self) -> float:
        return 0.0


class FakeRunner:
    """Keeps a digest for each slot, of its own token and all earlier ones, like K and V.

    A token is drawn from the digests of all slots of its sequence and from the request's seed. So a block that is
    wrongly shared, overwritten, or not written yet gives other tokens than `expected_tokens`. Prompt tokens are scored
    by the digest of the preceding token.
    """

    def __init__(self, block_size: int, vocabulary: int) -> None:
        self.fail_next = False
        self.plans: list[StepPlan] = []
        self._drawn: dict[int, int] = {}  # by the latest step, by sequence
        self._block_size = block_size
        self._vocabulary = vocabulary
        self._slots: dict[int, int] = {}
        self._host_slots: dict[int, int] = {}

    def launch(self, plan: StepPlan) -> Launched:
        """Compute the step at once; its result raises a failure, as on a device."""
        plan = replace(plan, work=tuple(map(self._with_tokens, plan.work)))
        try:
            results = self._execute(plan)
        except MadeToFail as failure:
            self._drawn = dict.fromkeys((work.sequence for work in plan.work), 0)  # as a device may return anything
            return FailedLater(failure)
        outcomes = iter(results)
        found = [(work, [next(outcomes) for _ in range(work.outcomes)]) for work in plan.work]
        self._drawn = {work.sequence: sampled[-1].token_id for work, sampled in found if work.samples}
        return Done(results)

    def _with_tokens(self, work: Work) -> Work:
        return work._replace(token_ids=(self._drawn[work.sequence],)) if work.token_ids == (PENDING,) else work

    def _execute(self, plan: StepPlan) -> list[Sampled]:
        for copies in plan.copies:
            self._copy(copies.device_to_host, self._slots, self._host_slots)
            self._copy(copies.host_to_device, self._host_slots, self._slots)
            self._copy(copies.device_to_device, self._slots, self._slots)
        written = [self._digests(work) for work in plan.work]
        for work, digests in zip(plan.work, written, strict=True):
            # A failed step may have written anything to its slots.
            self._write(work, [_NOTHING] * len(digests) if self.fail_next else digests)
        if self.fail_next:
            self.fail_next = False
            raise MadeToFail
        self.plans.append(plan)
        return [sampled for work in plan.work for sampled in self._results(work)]

    def _copy(self, copies: Sequence[Copy], sources: dict[int, int], destinations: dict[int, int]) -> None:
        for source, destination in copies:
            for offset in range(self._block_size):
                digest = sources.get(source * self._block_size + offset, _NOTHING)
                destinations[destination * self._block_size + offset] = digest

    def _digests(self, work: Work) -> list[int]:
        before = self._slots.get(self._slot(work, work.start - 1), _NOTHING) if work.start else 0
        return list(_chain(before, work.token_ids))

    def _write(self, work: Work, digests: list[int]) -> None:
        for position, digest in enumerate(digests, work.start):
            self._slots[self._slot(work, position)] = digest

    def _results(self, work: Work) -> Iterator[Sampled]:
        if part := work.to_score:
            for position, token in enumerate(part.token_ids, part.position):
                held = self._slots.get(self._slot(work, position - 1), _NOTHING)
                yield Sampled(token, float(_choice([held], (0, token), _SCORES)))
        if work.samples and work.candidates:
            top = _continuations(self._held(work), work.candidates, self._vocabulary)
            yield Sampled(top[0][0], None, top)
        elif work.samples:
            yield from (Sampled(self._token(work, index, work.least_end)) for index in work.sample_indices)
            for end in range(work.least_end + 1, work.end + 1):
                yield Sampled(self._token(work, work.sample_indices[0], end))

    def _token(self, work: Work, sample: int, end: int) -> int:
        return _choice(self._held(work)[:end], (work.sampling.seed, sample), self._vocabulary)

    def _held(self, work: Work) -> list[int]:
        return [self._slots.get(self._slot(work, position), _NOTHING) for position in range(work.end)]

    def _slot(self, work: Work, position: int) -> int:
        return work.block_table[position // self._block_size] * self._block_size + position % self._block_size


def expected_tokens(
    prompt: Sequence[int], seed: int, max_tokens: int, stop: frozenset[int], vocabulary: int, sample: int = 0
) -> list[int]:
    """Return the tokens of a request, independent of other requests."""
    digests = list(_chain(0, prompt))
    tokens: list[int] = []
    while len(tokens) < max_tokens and not (tokens and tokens[-1] in stop):
        tokens.append(_choice(digests, (seed, sample), vocabulary))
        digests += _chain(digests[-1], tokens[-1:])
    return tokens


def expected_answers(
    prompt: Sequence[int], search: BeamSearch, max_tokens: int, stop: frozenset[int], vocabulary: int
) -> list[tuple[list[int], float]]:
    """Return the answers of a beam search, best first, with scores, computed without incremental state."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    answers: list[tuple[float, list[int]]] = []
    for length in range(1, max_tokens + 1):
        grown = [
            (logprob + more, [*text, token])
            for logprob, text in beams
            for token, more in _continuations([*_chain(0, [*prompt, *text])], vocabulary, vocabulary)
        ]
        grown.sort(key=lambda one: -one[0])
        ended = [one for one in grown[: search.width] if one[1][-1] in stop or length == max_tokens]
        answers += [(logprob / length**search.length_penalty, text) for logprob, text in ended]
        answers = sorted(answers, key=lambda one: -one[0])[: search.width]
        kept = grown[: max(2, 1 + len(stop)) * search.width]
        beams = [one for one in kept if one[1][-1] not in stop][: search.width]
        full = len(answers) == search.width
        if not beams or (
            full and (search.early_stopping or beams[0][0] / length**search.length_penalty <= answers[-1][0])
        ):
            break
    return [(text, score) for score, text in answers]


def expected_scores(prompt: Sequence[int]) -> list[float]:
    """Return the expected scores of a prompt's tokens after the first, without log-probabilities."""
    digests = list(_chain(0, prompt))
    return [float(_choice([digest], (0, token), _SCORES)) for digest, token in zip(digests, prompt[1:], strict=False)]


def _chain(before: int, token_ids: Sequence[int]) -> Iterator[int]:
    for token in token_ids:
        before = hash((before, token))
        yield before


def _continuations(digests: list[int], count: int, vocabulary: int) -> tuple[tuple[int, float], ...]:
    logprobs = {token: -_choice(digests, (token, 0), _SCORES) / _SCORES for token in range(vocabulary)}
    return tuple(sorted(logprobs.items(), key=lambda one: -one[1])[:count])


def _choice(digests: list[int], drawn: tuple[int, int], vocabulary: int) -> int:
    return hash((drawn, *digests)) % vocabulary
