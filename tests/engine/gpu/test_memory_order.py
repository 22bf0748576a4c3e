"""Every two accesses of the GPU path to the same memory are ordered by a stream or an event."""

import gc
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from blocks import Copy
from engine.attention import TorchBackend
from engine.attention.backend import Direction
from engine.gpu.copy_stream import CudaCopyStream
from engine.gpu.graphs import CudaRecorder, RecordedDecoder, no_collection
from engine.model.decoder import Decoder, ModulesDecoder
from engine.model.loading import load_model
from engine.model.staging import Staging, cuda_staging
from engine.parallel import Shard
from engine.parallel.sliced_weights import ALL, SlicedWeights
from engine.run import block_copies
from engine.run.block_copies import BlockCopies
from engine.run.runner import ModelRunner
from engine.run.samplers import TorchSampler
from engine.schedule.request import LogitRules, Sampling
from engine.schedule.step_plan import PENDING, Copies, RowRules, Sampled, StepPlan, Work
from tests.engine.gpu.test_gpu_decoder import run_again
from tests.engine.gpu_in_host_memory import GpuInHostMemory, memory_of
from tests.engine.happens_before import AccessedBlocks, FakeCuda, FakeEvent, NotedLaunches, Race
from tests.engine_in_process import GREEDY

GPU = torch.device("cuda", 0)
SLOTS = 2
OUT, BACK = Direction.DEVICE_TO_HOST, Direction.HOST_TO_DEVICE


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


class Engine:
    """Copies and steps as an engine launches them, on the streams of `cuda`."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.stream = CudaCopyStream(GPU)
        self.backend = AccessedBlocks(cuda)
        self.copies = BlockCopies(self.backend, self.stream, SLOTS)  # type: ignore[arg-type]

    def copy(self, out: tuple[tuple[int, int], ...] = (), back: tuple[tuple[int, int], ...] = ()) -> None:
        self.copies.make([Copies(tuple(Copy(*one) for one in out), tuple(Copy(*one) for one in back))])

    def step(self, table: tuple[int, ...], start: int) -> None:
        self.copies.wait_for([Work(1, (0,) * (len(table) * SLOTS - start), start, table, True, GREEDY)])
        self.cuda.launch(
            [("device", block) for block in table], [("device", block) for block in table[start // SLOTS :]]
        )


@pytest.fixture
def engine(cuda: FakeCuda) -> Engine:
    return Engine(cuda)


def test_a_block_is_swapped_out_then_reused_by_a_step(engine: Engine) -> None:
    engine.step((3,), 0)
    engine.copy(out=((3, 1),))
    engine.step((3,), 0)


def test_a_block_is_swapped_in_then_read_by_a_step(engine: Engine) -> None:
    engine.copy(back=((1, 3),))
    engine.step((3, 4), SLOTS)


def test_a_block_is_swapped_out_and_another_swapped_into_its_place_at_once(engine: Engine) -> None:
    engine.copy(out=((3, 1),), back=((2, 3),))


def test_a_block_is_swapped_out_and_in_again(engine: Engine) -> None:
    engine.copy(out=((3, 1),))
    engine.copy(back=((1, 5),))


def test_a_host_block_is_read_then_overwritten(engine: Engine) -> None:
    engine.copy(back=((1, 5),))
    engine.copy(out=((3, 1),))


def test_both_directions_are_at_work_at_once_if_they_share_no_block(engine: Engine, cuda: FakeCuda) -> None:
    engine.copy(out=((3, 1),), back=((2, 4),))
    out, back = cuda.streams[-2:]
    assert out.name not in back.clock
    assert back.name not in out.clock


def test_random_copies_and_steps_are_ordered(engine: Engine) -> None:
    source = random.Random(3)

    def pairs() -> tuple[Copy, ...]:
        chosen = source.sample(range(1, 6), source.randrange(4))
        return tuple(Copy(source.randrange(1, 6), destination) for destination in chosen)

    for _ in range(150):
        within = pairs()
        written = {copy.destination for copy in within}
        within = tuple(copy for copy in within if copy.source not in written)
        engine.copies.make([Copies(pairs(), pairs(), within)])
        table = tuple(source.sample(range(1, 6), source.randrange(1, 6)))
        engine.step(table, source.randrange(len(table) * SLOTS))


def test_many_blocks_are_few_launches_of_bounded_size(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.copy(out=tuple((block, 100 - block) for block in range(1, 60)))
    assert engine.backend.launches == 1
    monkeypatch.setattr(block_copies, "_LAUNCHED_BLOCKS", 20)
    engine.copy(back=tuple((block, 100 - block) for block in range(1, 60)))
    assert engine.backend.launches == 1 + 3
    assert engine.copies.in_flight == 1 + 3


class TestCapture:
    def test_a_graph_is_captured_on_the_stream_of_its_first_runs_behind_earlier_work(
        self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cuda.install_graphs(monkeypatch)
        record = CudaRecorder(GPU)
        compute, streams = cuda.current, []

        def run() -> None:
            streams.append(cuda.current.name)
            cuda.launch(reads=["buffers"], writes=["workspace"])

        for _ in range(2):
            cuda.launch(writes=["buffers"])
            record(run)
        assert len(set(streams)) == 1
        assert streams[0] != compute.name
        assert cuda.current is compute

    def test_memory_is_shared_with_graphs_that_are_left_only(
        self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        graphs = cuda.install_graphs(monkeypatch)
        record = CudaRecorder(GPU)
        kept = [record(lambda: None), record(lambda: None)]
        first, second = (one.pool() for one in graphs)
        assert second is first
        del kept[0], graphs[0]
        kept.append(record(lambda: None))
        assert graphs[-1].pool() is first
        kept.clear()
        graphs.clear()
        kept.append(record(lambda: None))
        assert graphs[-1].pool() is not first

    @pytest.mark.parametrize("fails", [False, True])
    def test_no_garbage_is_collected_during_a_capture(
        self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, fails: bool
    ) -> None:
        graphs = cuda.install_graphs(monkeypatch)

        def run() -> None:
            if graphs:
                assert not gc.isenabled()
                assert not fails

        with pytest.raises(AssertionError) if fails else nullcontext():
            CudaRecorder(GPU)(run)
        assert graphs
        assert gc.isenabled()

    def test_garbage_is_collected_once_before_several_captures(
        self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        graphs = cuda.install_graphs(monkeypatch)
        collections: list[int] = []

        def count(phase: str, info: dict[str, int]) -> None:
            if phase == "start" and info["generation"] == 2:
                collections.append(len(graphs))

        gc.callbacks.append(count)
        try:
            with no_collection():
                for _ in range(3):
                    CudaRecorder(GPU)(lambda: None)
                    assert not gc.isenabled()
        finally:
            gc.callbacks.remove(count)
        assert collections == [0]
        assert len(graphs) == 3
        assert gc.isenabled()


class RecordedSteps:
    """A model on the CPU whose decoding steps are recorded, and the same model with launched steps."""

    def __init__(self, folder: Path) -> None:
        self.loaded = load_model(folder, torch.float32, torch.device("cpu"))
        self._backend = TorchBackend(self.loaded.geometry, 16, 8)
        self.launched = ModulesDecoder(self.loaded, self._backend)
        self.recorded = RecordedDecoder(self.launched, run_again, 16, 4, [1, 2], torch.device("cpu"))
        self.recorded.prepare(lambda done, of: None)
        assert self.recorded._output is not None
        self.logits = self.recorded._output

    def runner(self, decoder: Decoder, sampler: TorchSampler | None = None) -> ModelRunner:
        return ModelRunner(self.loaded, self._backend, 16, decoder=decoder, sampler=sampler)

    def ahead(self, decoder: Decoder, asked: dict[str, Any], *, overwritten: bool) -> list[list[Sampled]]:
        """Return the results of a step with prompts and of three behind it, read after all of them are launched."""
        runner, launched = self.runner(decoder), []
        for number in range(4):
            launched.append(runner.launch(StepPlan(number, (), self._work(number, asked))))
            if overwritten:
                with torch.inference_mode():
                    self.logits.fill_(torch.nan)
        return [one.result() for one in launched]

    def _work(self, number: int, asked: dict[str, Any]) -> tuple[Work, ...]:
        first = Work(1, (PENDING,) if number else (5, 6, 7), number + 2 if number else 0, (1,), True, GREEDY)
        other = Work(2, (PENDING,) if number else (8,), number, (2,), True, Sampling(0.7, seed=3, top_k=5))
        return (first._replace(**asked),) if number == 3 else (first._replace(**asked), other)


class TestLogitsOfRecordedSteps:
    @pytest.fixture
    def steps(self, tiny_model: Callable[[str], Path]) -> RecordedSteps:
        return RecordedSteps(tiny_model("llama"))

    @pytest.mark.parametrize(
        "asked",
        [
            {},
            {"logprobs": 3},
            {"candidates": 4},
            {"rules": RowRules(LogitRules(repetition_penalty=1.3), prompt=(5, 6, 7))},
            {"rules": RowRules(LogitRules(logit_bias=((3, 2.0),)), banned_token_ids=frozenset({4}))},
        ],
        ids=lambda asked: " ".join(asked) or "plain",
    )
    def test_a_step_has_read_its_logits_when_the_next_one_overwrites_them(
        self, steps: RecordedSteps, asked: dict[str, Any]
    ) -> None:
        found = steps.ahead(steps.recorded, asked, overwritten=True)
        assert found == steps.ahead(steps.launched, asked, overwritten=False)

    @pytest.mark.parametrize("waits", [True, False])
    def test_logits_are_read_on_the_stream_that_overwrites_them_or_waits(
        self, cuda: FakeCuda, steps: RecordedSteps, waits: bool
    ) -> None:
        another, compute = cuda.stream("another"), cuda.current

        class OnAnotherStream(TorchSampler):
            def sample(self, logits: torch.Tensor, draws: Any) -> torch.Tensor:
                another.wait_stream(compute)
                with cuda.using(another):
                    tokens = super().sample(logits, draws)
                if waits:
                    compute.wait_stream(another)
                return tokens

        two = tuple(Work(number, (5,), 0, (number,), True, Sampling(0.7, seed=3)) for number in (1, 2))
        with NotedLaunches(cuda):
            steps.runner(steps.recorded).launch(StepPlan(0, (), two))
            elsewhere = steps.runner(steps.recorded, OnAnotherStream())
            elsewhere.launch(StepPlan(1, (), two))
            race = f"{memory_of(steps.logits)} is written on compute while it is read on another"
            with nullcontext() if waits else pytest.raises(Race, match=race):
                elsewhere.launch(StepPlan(2, (), two[:1]))


class TestStaging:
    """Weights cross in pieces of 100 bytes, through two buffers."""

    SIZES = (7, 60, 1, 200)

    def staged(self, cuda: FakeCuda, staging: Staging) -> list[torch.Tensor]:
        sources = [torch.randn(size) for size in self.SIZES]
        targets = [torch.empty(size, device=GPU, dtype=torch.bfloat16 if size == 60 else None) for size in self.SIZES]
        for source, target in zip(sources, targets, strict=True):
            staging.copy(source, target)
        assert all(torch.equal(one.to(two.dtype), two) for one, two in zip(sources, targets, strict=True))
        cuda.launch(reads=map(memory_of, targets))
        return targets

    def test_buffers_are_written_again_only_after_their_copies(self, cuda: FakeCuda) -> None:
        with GpuInHostMemory(cuda):
            self.staged(cuda, cuda_staging(GPU, 100))

    def test_a_buffer_written_before_its_copy_has_ended_is_found(
        self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(FakeEvent, "synchronize", lambda _: None)
        with GpuInHostMemory(cuda), pytest.raises(Race, match="written on host while it is read on compute"):
            self.staged(cuda, cuda_staging(GPU, 100))

    def test_weights_read_on_another_stream_that_waits_for_nothing_are_found(self, cuda: FakeCuda) -> None:
        with GpuInHostMemory(cuda):
            targets = self.staged(cuda, cuda_staging(GPU, 100))
            with cuda.using(cuda.stream("another")), pytest.raises(Race, match="read on another while it is written"):
                cuda.launch(reads=map(memory_of, targets))

    @pytest.mark.parametrize("waits", [True, False])
    def test_buffers_are_free_for_the_host_once_all_copies_are_waited_for(self, cuda: FakeCuda, waits: bool) -> None:
        buffers: list[torch.Tensor] = []
        with GpuInHostMemory(cuda):
            staging = cuda_staging(GPU, 100)
            allocate = staging._allocate
            staging._allocate = lambda size: buffers.append(allocate(size)) or buffers[-1]  # type: ignore[func-returns-value]
            self.staged(cuda, staging)
            if waits:
                staging.finish()
            with nullcontext() if waits else pytest.raises(Race, match="written on host"):
                cuda.on_host(writes=map(memory_of, buffers))

    @pytest.mark.parametrize("shard", [Shard(0, 1), Shard(1, 2)], ids=str)
    def test_slices_of_ranks_go_through_the_same_buffers_in_order(
        self, cuda: FakeCuda, tiny_model: Callable[[str], Path], shard: Shard
    ) -> None:
        folder, name = tiny_model("llama"), "model.layers.0.self_attn.{}_proj.weight"
        rows = slice(shard.rank * 24, shard.rank * 24 + 24)
        with GpuInHostMemory(cuda):
            weights = SlicedWeights(folder, torch.bfloat16, GPU, cuda_staging(GPU, 100))
            fused = weights.together([(name.format(one), rows) for one in "qkv"])
            columns = weights.tensor(name.format("o"), ALL, rows)
            cuda.launch(reads=[memory_of(fused), memory_of(columns)])
            weights.finish()
        stored = load_file(folder / "model.safetensors")
        assert torch.equal(fused, torch.cat([stored[name.format(one)][rows] for one in "qkv"]).bfloat16())
        assert torch.equal(columns, stored[name.format("o")][:, rows].bfloat16())


class TestFake:
    """The tests' model of streams finds missing waits."""

    @pytest.mark.parametrize(
        "launch",
        [
            lambda engine: engine.stream.launch(lambda: engine.backend.swap([Copy(1, 7)], OUT), OUT),
            lambda engine: engine.stream.launch(lambda: engine.backend.swap([Copy(7, 2)], BACK), BACK),
        ],
    )
    def test_copies_that_wait_for_nothing(self, engine: Engine, launch: Callable[[Engine], object]) -> None:
        engine.copy(back=((5, 1),), out=((2, 7),))
        with pytest.raises(Race, match="stream"):
            launch(engine)

    def test_a_step_that_waits_for_nothing(self, engine: Engine, cuda: FakeCuda) -> None:
        engine.copy(out=((2, 7),))
        with pytest.raises(Race, match=r"\('device', 2\) is written on compute while it is read on stream"):
            cuda.launch(writes=[("device", 2)])
