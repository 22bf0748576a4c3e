"""An engine with a block manager in the same process; its clock counts turns."""

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import kvmanager
from blocks import Reattached, Step, StepResult
from engine.attention import AttentionBackend, TorchBackend
from engine.attention.cache import CacheGeometry
from engine.kinds.kinds_backend import CachingBackend, KindsBackend
from engine.kinds.layer_kinds import layer_kinds
from engine.kinds.split import SplitSizes, host_blocks_of, split_blocks
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from engine.proof.block_proof import BlockProof
from engine.run.loop import Engine, Turn
from engine.run.runner import ModelRunner
from engine.run.samplers import Sampler, TorchSampler
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits, Preemption
from engine.schedule.outputs import Finished, Scored, Started, Tokens
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.scheduler import IdleReason, Scheduler
from engine.schedule.sequence_group import Group
from engine.schedule.step_plan import Runner, Sampled
from services.engine.replica import Replica
from simulation.runner import MadeToFail
from tests.in_process import InProcessBlocks, adopted

GREEDY = Sampling(temperature=0.0)
_MOST_TURNS = 5000


Observer = Callable[[Step, kvmanager.AppliedStep], None]


class FickleBlocks(InProcessBlocks):
    """A block manager that can be disconnected, and delays answers by `delay` calls of `receive`."""

    def __init__(self, capacity: Capacity, observe: Observer | None = None) -> None:
        super().__init__(capacity, observe)
        self.delay = 0
        self._replica = self.make_replica()
        self._returned = False
        self._held_back = False

    def make_replica(self) -> Replica:
        return Replica(self.session.pool.spec)

    @property
    def answers_late(self) -> bool:
        """Whether `receive` held back an answer."""
        return self._held_back

    def send(self, step: Step) -> None:
        self._replica.add_in_flight(step)
        super().send(step)

    def receive(self) -> StepResult | None:
        if self._returned:
            self._returned, self.ready = False, True
            replica = self._replica
            available = replica.available_blocks, replica.available_host_blocks
            raise Reattached(*available, replica.pins, replica.available_in_windows)
        self._held_back = bool(self._answers and self.delay)
        if self._held_back:
            self.delay -= 1
            return None
        result = super().receive()
        if result is not None:
            self._replica.apply_result(result)
        return result

    def lose(self) -> None:
        """Disconnect: results of applied Steps are lost."""
        self._answers.clear()
        self.ready = False

    def restore(self) -> None:
        spec = self.session.pool.spec
        self.session = self.manager.attach(spec, adopted(spec, self._replica.report()))
        self._returned = True


MOST_TURNS = 20_000


class EngineInProcess:
    """Runs an engine turn by turn, and collects its outputs by request id."""

    def __init__(
        self,
        runner: Runner,
        capacity: Capacity,
        limits: Limits | None = None,
        observe: Observer | None = None,
        scheduler: Scheduler | None = None,
        ahead: bool = False,
        counts_tokens: bool = False,
    ) -> None:
        self.blocks = self.make_blocks(capacity, observe)
        self.scheduler = scheduler or Scheduler(capacity, limits or Limits(), ahead=ahead, counts_tokens=counts_tokens)
        self.engine = Engine(self.scheduler, runner, self.blocks, self.now, self.make_proof())
        self.turns = 0
        self.turn_seconds = 1.0
        self._unexplained = 0  # consecutive turns without progress and without a reason
        self.tokens: dict[str, list[int]] = {}  # of the first sample
        self.samples: dict[str, list[list[int]]] = {}
        self.drawn: dict[str, list[list[Sampled]]] = {}
        self.sampled: dict[str, list[Sampled]] = {}  # of the first sample
        self.scored: dict[str, list[Sampled]] = {}  # of the prompt, from its second token on
        self.cached: dict[str, int] = {}
        self.finished: dict[str, Group] = {}
        self.failures: list[MadeToFail] = []

    def now(self) -> float:
        return self.turns * self.turn_seconds

    def make_blocks(self, capacity: Capacity, observe: Observer | None) -> FickleBlocks:
        return FickleBlocks(capacity, observe)

    def make_proof(self) -> BlockProof | None:
        """Return what makes the copies and compares blocks; without, steps make the copies."""
        return None

    def submit(
        self,
        prompt: Iterable[int],
        max_tokens: int,
        *,
        sampling: Sampling = GREEDY,
        stop: Iterable[int] = (),
        request_id: str = "",
        priority: int = 0,
        salt: bytes = b"",
        age: float = 0.0,
        samples: int | tuple[tuple[int, ...], ...] = 1,
        **rest: Any,
    ) -> str:
        """Queue a request that arrived `age` turns ago, with the `rest` of its fields; return its id.

        `samples` is their count, or the tokens that each has already.
        """
        request = Request(
            request_id=request_id or f"r{len(self.tokens)}",
            prompt=tuple(prompt),
            sampling=sampling,
            stopping=Stopping(max_tokens, frozenset(stop)),
            salt=salt,
            priority=priority,
            arrival=self.turns - age,
            samples=((),) * samples if isinstance(samples, int) else samples,
            **rest,
        )
        self.take(request)
        return request.request_id

    def take(self, request: Request) -> None:
        self.scheduler.requests.submit(request)
        self.samples[request.request_id] = [[] for _ in request.samples]
        self.tokens[request.request_id] = self.samples[request.request_id][0]
        self.drawn[request.request_id] = [[] for _ in request.samples]
        self.sampled[request.request_id] = self.drawn[request.request_id][0]
        self.scored[request.request_id] = []

    def turn(self) -> Turn:
        self.turns += 1
        turn = self.engine.turn()
        self._check_idle(turn)
        self._note_failure()
        for output in turn.outputs:
            match output:
                case Started():
                    assert output.request_id not in self.cached, "a request starts once"
                    self.cached[output.request_id] = output.cached_tokens
                case Scored():
                    assert output.request_id in self.cached, "a request starts before its scores"
                    assert not self.tokens[output.request_id], "a prompt is scored before there are tokens"
                    assert output.position == len(self.scored[output.request_id]) + 1, "each position once, in order"
                    self.scored[output.request_id] += output.tokens
                case Tokens():
                    assert output.request_id not in self.finished, "nothing follows the end of a request"
                    assert output.request_id in self.cached, "a request starts before its tokens"
                    self.samples[output.request_id][output.sample] += output.token_ids
                    self.drawn[output.request_id][output.sample] += output.tokens
                case Finished():
                    assert output.request_id not in self.finished, "a request ends once"
                    self.finished[output.request_id] = output.group
        return turn

    def _check_idle(self, turn: Turn) -> None:
        """Check that a loop which sleeps only for a reason would wake up, and that it would not spin."""
        match turn.idle:
            case IdleReason.EMPTY:
                assert self.scheduler.empty
            case IdleReason.ANSWER:
                assert self.blocks.answers_late, "the answer has been received"
            case IdleReason.DISCONNECTED:
                assert not self.blocks.ready
        self._unexplained = 0 if turn.progressed or turn.idle else self._unexplained + 1
        assert self._unexplained <= 1, "requests are live, but the scheduler makes no progress"

    def _note_failure(self) -> None:
        failure = self.engine.take_failure()
        if isinstance(failure, MadeToFail):
            self.failures.append(failure)
        elif failure is not None:
            raise failure

    def turn_times(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def turn_until(self, condition: Callable[[], object]) -> None:
        latest = self.turns + MOST_TURNS
        while not condition():
            assert self.turns < latest, "the condition never holds"
            self.turn()

    def reconnect(self, turns: int = 1) -> None:
        """Lose the block manager for some turns."""
        self.blocks.lose()
        self.turn_times(turns)
        self.blocks.restore()

    def run(self, most_turns: int = _MOST_TURNS) -> None:
        """Turn until no request is live, then check that every block is free."""
        for _ in range(most_turns):
            if self.scheduler.empty:
                self.assert_released()
                return
            self.turn()
        raise AssertionError(f"requests are live after {most_turns} turns")

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, **options: object) -> list[list[int]]:
        ids = [self.submit(prompt, max_tokens, **options) for prompt in prompts]  # type: ignore[arg-type]
        self.run()
        return [self.tokens[request_id] for request_id in ids]

    def assert_released(self) -> None:
        """Check the pool's invariants, and that only pins hold blocks."""
        pool = self.blocks.pool
        assert pool.violations() == []
        pinned = {block for blocks in pool.state.pins.values() for block in blocks}
        assert pool.device.counts.held == len(pinned)
        assert not pool.sequences


class ModelEngine(EngineInProcess):
    """An engine with a model on the CPU, in float32."""

    def __init__(
        self,
        folder: Path,
        *,
        block_size: int = 16,
        device_blocks: int = 256,
        token_budget: int = 512,
        max_sequences: int = 64,
        host_blocks: int = 0,
        preemption: Preemption = Preemption.RECOMPUTE,
        observe: Observer | None = None,
        ahead: bool = False,
        sampler: Sampler | None = None,
        proposed_tokens: int = 0,
        kinds: bool = False,
    ) -> None:
        """With `kinds`, layers with windows keep what they see, in blocks as the engine's settings give them."""
        self.folder = folder
        self.sampler = sampler or TorchSampler()
        self.loaded = loaded_model(folder)
        sequences = min(max_sequences, token_budget)
        sizes = (self.loaded.context_tokens, self.loaded.vocabulary_size, block_size, device_blocks, host_blocks)
        self.kinds = layer_kinds(self.loaded.geometry, self.loaded.context_tokens) if kinds else ()
        context = self.loaded.context_tokens
        split = SplitSizes(block_size, context, token_budget, sequences, context // 2)
        blocks = split_blocks(self.kinds, device_blocks, split)
        hosts = host_blocks_of(self.kinds, host_blocks, split)
        windows = [kind.window(*of, 0) for kind, *of in list(zip(self.kinds, blocks, hosts, strict=False))[1:]]
        capacity = Capacity(*sizes, windows=tuple(windows), step_tokens=token_budget)
        self.backend: AttentionBackend
        if len(self.kinds) > 1:
            self.backend = KindsBackend.of(
                self.kinds,
                self.loaded.geometry,
                lambda geometry, kind: self.make_backend(geometry, block_size, blocks[kind], hosts[kind]),
            )
        else:
            self.backend = self.make_backend(self.loaded.geometry, block_size, device_blocks, host_blocks)
        runner = self.make_runner(block_size, ahead)
        limits = Limits(token_budget, sequences, preemption=preemption, proposed_tokens=proposed_tokens)
        super().__init__(runner, capacity, limits, observe, ahead=ahead, counts_tokens=self.sampler.counts_tokens)

    def make_runner(self, block_size: int, _ahead: bool) -> Runner:
        return ModelRunner(self.loaded, self.backend, block_size, sampler=self.sampler)

    def make_backend(
        self, geometry: CacheGeometry, block_size: int, device_blocks: int, host_blocks: int
    ) -> CachingBackend:
        return TorchBackend(geometry, block_size, device_blocks, host_blocks=host_blocks)


class EightBitEngine(ModelEngine):
    """An engine whose K and V have 8 bits."""

    def make_backend(
        self, geometry: CacheGeometry, block_size: int, device_blocks: int, host_blocks: int
    ) -> CachingBackend:
        return TorchBackend(geometry, block_size, device_blocks, torch.int8, host_blocks=host_blocks)


@functools.cache
def loaded_model(folder: Path) -> LoadedModel:
    return load_model(folder, torch.float32, torch.device("cpu"))
