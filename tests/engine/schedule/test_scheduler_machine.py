"""Random requests, ends from outside, late results, lost pools and failing steps in tiny pools, with invariants."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.errors import InvalidPin, InvalidRequest, PinExists, PinTooLarge, UnknownPin
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits, Preemption
from engine.schedule.request import BeamSearch, Failure, FinishReason, Sampling
from simulation.runner import DigestRunner, expected_answers, expected_scores, expected_tokens
from tests.engine.watched_scheduler import WatchedScheduler
from tests.engine_in_process import GREEDY, EngineInProcess

CONTEXT = 24
VOCABULARY = 3
IDLE_TURNS = 2  # before the first work, and before the end is published
TURNS_PER_TOKEN = 6


@dataclass(frozen=True)
class _Submitted:
    prompt: tuple[int, ...]
    max_tokens: int
    stop: frozenset[int]
    seed: int
    samples: int
    scored: bool
    search: BeamSearch | None
    generated: tuple[int, ...]  # token counts of the samples before the cut
    ended: frozenset[int]  # samples that had ended before the cut
    has_deadline: bool


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.tuples(st.sampled_from([1, 2, 3, 4, 24]), st.integers(2, 12), st.integers(0, 12)),
        sizes=st.tuples(st.integers(1, 12), st.integers(1, 6)),
        preemption=st.sampled_from(Preemption),
        policy=st.tuples(*map(st.sampled_from, ([0.0, 0.1, 0.5], [0.0, 2.0], [3.0, 1000.0]))),
        mode=st.sampled_from([(False, 0), (True, 0), (False, 2), (False, 5)]),  # steps ahead, proposed tokens
        # Uncached tokens that one Step admits, tokens from which on a prompt is long, and prompts that share a step.
        prefill=st.tuples(*map(st.sampled_from, ([0, 1, 5], [0, 2, 5], [(1, 1), (2, 1), (3, 2)]))),
        turn_seconds=st.sampled_from([0.05, 1.0]),  # in short turns, reports wait for other items
    )
    def begin(
        self,
        blocks: tuple[int, int, int],
        sizes: tuple[int, int],
        preemption: Preemption,
        policy: tuple[float, float, float],
        mode: tuple[bool, int],
        prefill: tuple[int, int, tuple[int, int]],
        turn_seconds: float,
    ) -> None:
        self.block_size = blocks[0]
        capacity = Capacity(CONTEXT, VOCABULARY, *blocks)
        watermark, aging, isolation = policy
        ahead, proposed = mode
        budget, threshold, partial = prefill
        limits = Limits(
            *(sizes[0], min(sizes), 1024, preemption, watermark, aging, isolation, proposed),
            *(budget, threshold, *partial),
        )
        self.scheduler = WatchedScheduler(capacity, limits, ahead=ahead)
        self.runner = DigestRunner(capacity)
        self.engine = EngineInProcess(self.runner, capacity, scheduler=self.scheduler)
        self.engine.turn_seconds = turn_seconds
        self.scheduler.pool = lambda: self.engine.blocks.pool
        self.submitted: dict[str, _Submitted] = {}
        self.disconnected_turns = 0
        self.cancelled: set[str] = set()
        self.stopped: set[tuple[str, int]] = set()  # samples ended as by a stop string

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple),
        max_tokens=st.integers(0, 10),
        priority=st.integers(0, 2),
        age=st.integers(0, 3),
        salt=st.sampled_from([b"", b"", b"x"]),
        stop=st.sampled_from([frozenset[int](), frozenset({2})]),
        copies=st.integers(1, 3),
        samples=st.sampled_from([1, 1, 1, 2, 3]),
        scored=st.sampled_from([False, False, True]),
        search=st.none()
        | st.none()
        | st.builds(BeamSearch, st.integers(1, 4), st.sampled_from([0.0, 1.0, 2.0]), st.booleans()),
        cuts=st.none() | st.none() | st.tuples(*[st.integers(0, 10)] * 3),
        isolated=st.sampled_from([False, False, True]),
        patience=st.sampled_from([None, None, None, 1, 4, 12]),  # turns until its deadline
    )
    def submit(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        priority: int,
        age: int,
        salt: bytes,
        stop: frozenset[int],
        copies: int,
        samples: int,
        scored: bool,
        search: BeamSearch | None,
        cuts: tuple[int, ...] | None,
        isolated: bool,
        patience: int | None,
    ) -> None:
        capacity = self.scheduler.capacity
        shared = len(prompt) // capacity.block_size
        own = -(-max(1, len(prompt) + max_tokens - 1) // capacity.block_size) - shared
        samples = min(samples, search.width) if search else samples
        now = self.engine.turns * self.engine.turn_seconds
        deadline = None if patience is None else now + patience * self.engine.turn_seconds
        for _ in range(copies):
            seed = len(self.submitted)
            begun, ended = self._begun(prompt, seed, max_tokens, stop, samples, () if search or not cuts else cuts)
            sequences = search.width if search else samples - len(ended) if max_tokens else 1
            blocks = shared + sequences * own
            fits = blocks <= capacity.unpinned_blocks and sequences <= self.scheduler.limits.max_sequences
            fits = fits and not (search and not max_tokens)
            try:
                name = self.engine.submit(
                    prompt,
                    max_tokens,
                    sampling=GREEDY if search else Sampling(seed=seed),
                    stop=stop,
                    priority=priority,
                    salt=salt,
                    age=age,
                    samples=begun,
                    ended=ended,
                    prompt_logprobs=0 if scored else None,
                    beam_search=search,
                    isolated=isolated,
                    deadline=deadline,
                )
            except InvalidRequest:
                assert not fits
                return
            assert fits
            generated = tuple(map(len, begun))
            self.submitted[name] = _Submitted(
                prompt, max_tokens, stop, seed, samples, scored, search, generated, ended, deadline is not None
            )

    def _begun(
        self,
        prompt: tuple[int, ...],
        seed: int,
        max_tokens: int,
        stop: frozenset[int],
        samples: int,
        cuts: Sequence[int],
    ) -> tuple[tuple[tuple[int, ...], ...], frozenset[int]]:
        """Return the tokens of each sample at the cut, and the ended samples: never all of them."""
        if not max_tokens:
            return ((),) * samples, frozenset()
        wholes = [
            tuple(expected_tokens(prompt, seed, max_tokens, stop, VOCABULARY, sample)) for sample in range(samples)
        ]
        begun = [whole[:cut] for whole, cut in zip_longest(wholes, cuts[:samples], fillvalue=0)]
        if begun == wholes:
            begun[-1] = begun[-1][:-1]
        return tuple(begun), frozenset(index for index in range(samples) if begun[index] == wholes[index])

    @rule(turns=st.integers(1, 8))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self._turn()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(["nobody", *self.submitted]))
        if name not in self.engine.finished:
            self.cancelled.add(name)
        self.engine.scheduler.requests.cancel(name)

    @rule(data=st.data(), count=st.integers(1, 3))
    def stop_samples(self, data: st.DataObject, count: int) -> None:
        live = [(name, index) for name in self.scheduler.live() for index in range(self.submitted[name].samples)]
        for name, index in data.draw(st.permutations(live))[:count]:
            self.stopped.add((name, index))
            self.engine.scheduler.requests.end_sample(name, index)

    @rule(
        name=st.sampled_from("pq"),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple),
        salt=st.sampled_from([b"", b"", b"x"]),
    )
    def pin(self, name: str, prompt: tuple[int, ...], salt: bytes) -> None:
        whole = prompt[: len(prompt) // self.block_size * self.block_size]
        known = {pin.name: (pin.token_ids, pin.salt) for pin in self.scheduler.pins.list_pins()}
        try:
            self.scheduler.requests.pin(name, prompt, salt, float(self.engine.turns))
        except InvalidPin:
            assert not whole
        except PinExists:
            assert known[name] != (whole, salt)
        except PinTooLarge:
            assert name not in known
        else:
            assert known.get(name, (whole, salt)) == (whole, salt)

    @rule(name=st.sampled_from("pq"))
    def unpin(self, name: str) -> None:
        known = [pin.name for pin in self.scheduler.pins.list_pins()]
        try:
            self.scheduler.requests.unpin(name)
        except UnknownPin:
            assert name not in known
        else:
            assert name in known

    @rule()
    def reset(self) -> None:
        self.scheduler.requests.reset(float(self.engine.turns))

    @rule(turns=st.integers(1, 4))
    def delay_results(self, turns: int) -> None:
        self.engine.blocks.delay = turns

    @rule(turns=st.integers(0, 4))
    def lose_pool(self, turns: int) -> None:
        if not self.disconnected_turns:
            self.engine.blocks.lose()
            self.disconnected_turns = turns + 1

    @rule()
    def fail_next_step(self) -> None:
        self.runner.fail_next = True

    def _turn(self) -> None:
        if self.disconnected_turns:
            self.disconnected_turns -= 1
            if not self.disconnected_turns:
                self.engine.blocks.restore()
        self.engine.turn()

    @invariant()
    def pool_has_no_violations(self) -> None:
        assert self.engine.blocks.pool.violations() == []

    @invariant()
    def tokens_so_far_are_as_expected(self) -> None:
        for name, samples in self.engine.samples.items():
            for tokens, expected in zip(samples, self._expected(name), strict=True):
                assert tokens == expected[: len(tokens)]

    @invariant()
    def scores_so_far_are_as_expected(self) -> None:
        for name, request in self.submitted.items():
            scores = [token.logprob for token in self.engine.scored[name]]
            expected = expected_scores(request.prompt) if request.scored else []
            assert scores == expected[: len(scores)]
            assert scores == expected or not any(self.engine.samples[name]), "the prompt is scored first"

    @invariant()
    def every_request_is_live_or_has_ended(self) -> None:
        states = [self.scheduler.live(), self.scheduler.unpublished_ends(), *([name] for name in self.engine.finished)]
        names = [name for state in states for name in state]
        assert sorted(names) == sorted(self.submitted), "each is in exactly one state"

    def _expected(self, name: str) -> list[list[int]]:
        request = self.submitted[name]
        if request.search:
            answers = expected_answers(request.prompt, request.search, request.max_tokens, request.stop, VOCABULARY)
            return [tokens for tokens, _ in answers[: request.samples]]
        options = (request.prompt, request.seed, request.max_tokens, request.stop, VOCABULARY)
        return [expected_tokens(*options, sample)[cut:] for sample, cut in enumerate(request.generated)]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.blocks.delay = 0
        self.runner.fail_next = False
        due = sum(
            len(one.prompt) + (one.search.width if one.search else one.samples) * one.max_tokens
            for one in self.submitted.values()
        )
        due += sum(len(pin.token_ids) for pin in self.scheduler.pins.list_pins())
        for _ in range(self.disconnected_turns + IDLE_TURNS + TURNS_PER_TOKEN * due):
            if self.scheduler.empty and not self.disconnected_turns:
                break
            self._turn()
        self._turn()  # a cancellation after the last turn is reported in the next
        assert self.scheduler.empty, "requests are still live"
        self.engine.assert_released()
        self.scheduler.check_idle()
        assert self.engine.finished.keys() == self.submitted.keys()
        for name, group in self.engine.finished.items():
            assert len(group.samples) == self.submitted[name].samples
            for index, member in enumerate(group.samples):
                self._check_end(name, index, member.finish)

    def _check_end(self, name: str, sample: int, finish: FinishReason | None) -> None:
        tokens, expected = self.engine.samples[name][sample], self._expected(name)[sample]
        if sample in self.submitted[name].ended:
            assert (tokens, finish) == ([], FinishReason.STOP)
        elif finish is FinishReason.STOP and (name, sample) in self.stopped:
            assert tokens == expected[: len(tokens)]
        elif finish in (FinishReason.STOP, FinishReason.LENGTH):
            assert tokens == expected
            assert (finish is FinishReason.STOP) == (not self.submitted[name].stop.isdisjoint(tokens[-1:]))
            if self.submitted[name].scored:
                assert len(self.engine.scored[name]) == len(self.submitted[name].prompt) - 1
        elif finish is FinishReason.CANCELLED:
            assert name in self.cancelled
        else:
            assert finish is FinishReason.FAILED
            late = self.engine.finished[name].failure in (Failure.DEADLINE, Failure.DEADLINE_QUEUED)
            assert self.engine.failures or (late and self.submitted[name].has_deadline)


SchedulerMachine.TestCase.settings = settings(
    max_examples=250,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestRandomRequests = SchedulerMachine.TestCase
