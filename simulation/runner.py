"""A model without weights: its next token is a function of the contents of the blocks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from engine.gpu.copy_stream import InlineCopyStream
from engine.run.block_copies import BlockCopies
from engine.schedule.capacity import Capacity
from engine.schedule.request import BeamSearch
from engine.schedule.step_plan import PENDING, Done, Launched, Sampled, StepPlan, Work
from simulation.digest_memory import NOTHING, DigestMemory, Outliving, chain

_SCORES = 10**6


class MadeToFail(Exception):
    """An injected failure of a step."""


@dataclass(frozen=True)
class FailedLater:
    """A step whose failure is raised by its result."""

    failure: Exception

    def result(self) -> list[Sampled]:
        """Raise the failure."""
        raise self.failure

    def sample_seconds(self) -> float:
        """Return 0: nothing was sampled."""
        return 0.0


class DigestRunner:
    """Keeps a digest for each slot, of its own token and all earlier ones, like K and V.

    A token is drawn from the digests of all slots of its sequence and from the request's seed. So a block that is
    wrongly shared, overwritten, or not written yet gives other tokens than `expected_tokens`. Prompt tokens are scored
    by the digest of the preceding token. Window kinds have the same digests, and a token whose window lacks one of them
    is another one, too.
    """

    def __init__(self, capacity: Capacity, shared: Sequence[Outliving] = ()) -> None:
        self.fail_next = False
        self.failed_steps = 0
        self.plans: list[StepPlan] = []
        self.memory = DigestMemory(capacity, shared)
        self._drawn: dict[int, int] = {}  # by the latest step, by sequence
        self._block_size = capacity.block_size
        self._vocabulary = capacity.vocabulary_size
        self._windows = capacity.windows
        self._copies = [
            BlockCopies(one, InlineCopyStream(), self._block_size, kind)  # type: ignore[arg-type]
            for kind, one in enumerate(self.memory.kinds)
        ]

    def flipped_read(self, plan: StepPlan) -> str:
        """Return which flipped block a step has read, empty if none. Call it when the step has just been computed."""
        for work in plan.work:
            for memory, table in zip(self.memory.kinds, (work.block_table, *work.window_tables), strict=True):
                for position in range(work.start):
                    block, offset = divmod(position, self._block_size)
                    if offset in memory.flipped.of(False, table[block]):
                        return f"block {table[block]}"
        return ""

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
        for copies in self._copies:
            copies.make(plan.copies)
        written = [self._digests(work) for work in plan.work]
        for work, digests in zip(plan.work, written, strict=True):
            # A failed step may have written anything to its slots.
            self._write(work, [NOTHING] * len(digests) if self.fail_next else digests)
        if self.fail_next:
            self.fail_next = False
            self.failed_steps += 1
            raise MadeToFail
        self.plans.append(plan)
        return [sampled for work in plan.work for sampled in self._results(work)]

    def _digests(self, work: Work) -> list[int]:
        before = self._slot(work, work.start - 1) if work.start else 0
        lacking = not self._windows_hold(work, work.start, work.start)
        return list(chain(hash((before, "lacking")) if lacking else before, work.token_ids))

    def _write(self, work: Work, digests: list[int]) -> None:
        tables = zip(self.memory.kinds, (work.block_table, *work.window_tables), strict=True)
        for memory, table in tables:
            for position, digest in enumerate(digests, work.start):
                block, offset = divmod(position, self._block_size)
                memory.write(table[block], offset, digest)

    def _windows_hold(self, work: Work, position: int, end: int) -> bool:
        """Return whether each window kind has the digests below `end` that the query at a position sees."""
        for kind, memory, table in zip(self._windows, self.memory.windows, work.window_tables, strict=True):
            for token in range(kind.first_token(position), end):
                block, offset = divmod(token, self._block_size)
                if int(memory.device[table[block], offset]) != self._slot(work, token):
                    return False
        return True

    def _results(self, work: Work) -> Iterator[Sampled]:
        if part := work.to_score:
            for position, token in enumerate(part.token_ids, part.position):
                held = self._slot(work, position - 1)
                yield Sampled(token, float(_choice([held], (0, token), _SCORES)))
        if work.samples and work.candidates:
            top = _continuations(self._held(work), work.candidates, self._vocabulary)
            yield Sampled(top[0][0], None, top)
        elif work.samples:
            yield from (Sampled(self._token(work, index, work.least_end)) for index in work.sample_indices)
            for end in range(work.least_end + 1, work.end + 1):
                yield Sampled(self._token(work, work.sample_indices[0], end))

    def _token(self, work: Work, sample: int, end: int) -> int:
        lacking = 0 if self._windows_hold(work, end - 1, end) else 1
        return _choice(self._held(work)[:end], (work.sampling.seed, sample), self._vocabulary, lacking)

    def _held(self, work: Work) -> list[int]:
        blocks = -(-work.end // self._block_size)
        held: list[int] = self.memory.device[list(work.block_table[:blocks])].flatten()[: work.end].tolist()
        return held

    def _slot(self, work: Work, position: int) -> int:
        block, offset = divmod(position, self._block_size)
        return int(self.memory.device[work.block_table[block], offset])


def expected_tokens(
    prompt: Sequence[int], seed: int, max_tokens: int, stop: frozenset[int], vocabulary: int, sample: int = 0
) -> list[int]:
    """Return the tokens of a request, independent of other requests."""
    digests = list(chain(0, prompt))
    tokens: list[int] = []
    while len(tokens) < max_tokens and not (tokens and tokens[-1] in stop):
        tokens.append(_choice(digests, (seed, sample), vocabulary))
        digests += chain(digests[-1], tokens[-1:])
    return tokens


def expected_answers(
    prompt: Sequence[int],
    search: BeamSearch,
    max_tokens: int,
    stop: frozenset[int],
    vocabulary: int,
    searched: list[list[int]] | None = None,
) -> list[tuple[list[int], float]]:
    """Return the answers of a beam search, best first, with scores, computed without incremental state.

    The beams of all lengths are added to `searched`.
    """
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    answers: list[tuple[float, list[int]]] = []
    for length in range(1, max_tokens + 1):
        grown = [
            (logprob + more, [*text, token])
            for logprob, text in beams
            for token, more in _continuations([*chain(0, [*prompt, *text])], vocabulary, vocabulary)
        ]
        grown.sort(key=lambda one: -one[0])
        ended = [one for one in grown[: search.width] if one[1][-1] in stop or length == max_tokens]
        answers += [(logprob / length**search.length_penalty, text) for logprob, text in ended]
        answers = sorted(answers, key=lambda one: -one[0])[: search.width]
        kept = grown[: max(2, 1 + len(stop)) * search.width]
        beams = [one for one in kept if one[1][-1] not in stop][: search.width]
        if searched is not None:
            searched += [text for _, text in beams]
        full = len(answers) == search.width
        if not beams or (
            full and (search.early_stopping or beams[0][0] / length**search.length_penalty <= answers[-1][0])
        ):
            break
    return [(text, score) for score, text in answers]


def expected_scores(prompt: Sequence[int]) -> list[float]:
    """Return the expected scores of a prompt's tokens after the first, without log-probabilities."""
    digests = list(chain(0, prompt))
    return [float(_choice([digest], (0, token), _SCORES)) for digest, token in zip(digests, prompt[1:], strict=False)]


def _continuations(digests: list[int], count: int, vocabulary: int) -> tuple[tuple[int, float], ...]:
    logprobs = {token: -_choice(digests, (token, 0), _SCORES) / _SCORES for token in range(vocabulary)}
    return tuple(sorted(logprobs.items(), key=lambda one: -one[1])[:count])


def _choice(digests: list[int], drawn: tuple[int, int], vocabulary: int, lacking: int = 0) -> int:
    return (hash((drawn, *digests)) + lacking) % vocabulary
