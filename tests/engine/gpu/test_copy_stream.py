"""Copies between the tiers concurrent with steps: cases 60, 61 and 63 of docs/kv-acceptance.md."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from blocks import Copy
from engine.attention import TorchBackend
from engine.attention.backend import Direction
from engine.attention.cache import CacheGeometry
from engine.errors import CopyFailed
from engine.gpu.copy_stream import CopyStream, CudaCopyStream, InlineCopyStream, copy_stream_for
from engine.run.block_copies import BlockCopies
from engine.run.runner import ModelRunner
from engine.schedule.capacity import Capacity
from engine.schedule.outputs import Finished
from engine.schedule.step_plan import Copies, Done, StepPlan, Work
from tests.engine.copy_streams import (
    MAX_SECONDS,
    FreeCopyStream,
    HeldCopy,
    HeldCopyStream,
    LateCopyStream,
    UnevenCopyStream,
)
from tests.engine_in_process import GREEDY, EngineInProcess, ModelEngine, loaded_model
from tests.reference import greedy_reference

uniform = CacheGeometry.uniform

BLOCK = 4
FIRST = (11, 12, 13, 14, 15, 16, 17)
SECOND = (21, 22, 23, 24, 25, 26)

Tiny = Callable[[str], Path]
Expect = Callable[[tuple[int, ...]], list[int]]


class FailingBackend(TorchBackend):
    fails = False

    def swap(self, copies: Any, direction: Direction) -> None:
        self._check()
        super().swap(copies, direction)

    def copy_blocks(self, copies: Any) -> None:
        self._check()
        super().copy_blocks(copies)

    def _check(self) -> None:
        if self.fails:
            raise OSError("made to fail")


class Rig:
    """A runner of a real model with a HeldCopyStream. Steps run on a separate thread while the test continues."""

    def __init__(self, folder: Path) -> None:
        loaded = loaded_model(folder)
        self.stream = HeldCopyStream()
        self.backend = FailingBackend(loaded.geometry, BLOCK, 8, host_blocks=4)
        self.runner = ModelRunner(loaded, self.backend, BLOCK, self.stream)
        self._thread = ThreadPoolExecutor(1)

    def begin(self, *copies: Copies, work: tuple[Work, ...] = ()) -> "Future[list[int]]":
        step = self._thread.submit(self._tokens, StepPlan(1, copies, work))
        step.add_done_callback(self.stream.events.put)
        return step

    def run(self, *copies: Copies, work: tuple[Work, ...] = ()) -> list[int]:
        """Execute a plan that waits for no copy."""
        step = self.begin(*copies, work=work)
        assert self.next_event() is step, "the step waits for a copy"
        return step.result()

    def next_event(self) -> object:
        """Return the next copy that a step starts to wait for, or the next step that ends."""
        return self.stream.events.get(timeout=MAX_SECONDS)

    def waited_for(self) -> HeldCopy:
        copy = self.next_event()
        assert isinstance(copy, HeldCopy), "no step waits for a copy"
        return copy

    @property
    def copies(self) -> list[HeldCopy]:
        return self.stream.copies

    @property
    def host_cache(self) -> torch.Tensor:
        assert self.backend.host_cache is not None
        return self.backend.host_cache

    def _tokens(self, plan: StepPlan) -> list[int]:
        return [sampled.token_id for sampled in self.runner.launch(plan).result()]

    def close(self) -> None:
        self.stream.close()
        self._thread.shutdown()


@pytest.fixture
def rig(tiny_model: Tiny) -> Iterator[Rig]:
    one = Rig(tiny_model("llama"))
    yield one
    one.close()


@pytest.fixture
def cache_with_first(rig: Rig) -> torch.Tensor:
    """Feed FIRST to blocks 3 and 5, and return the contents of the device tier."""
    rig.run(work=(feed(FIRST, (3, 5)),))
    return rig.backend.cache.clone()


@pytest.fixture
def expect(tiny_model: Tiny) -> Expect:
    """Return the next token of a prompt by the reference."""
    return lambda prompt: greedy_reference(tiny_model("llama"), [prompt], 1)[0]


def feed(token_ids: tuple[int, ...], table: tuple[int, ...], start: int = 0) -> Work:
    return Work(1, token_ids, start, table, True, GREEDY)


def out(*pairs: tuple[int, int]) -> Copies:
    return Copies(device_to_host=tuple(Copy(*pair) for pair in pairs))


def back(*pairs: tuple[int, int]) -> Copies:
    return Copies(host_to_device=tuple(Copy(*pair) for pair in pairs))


class TestASlowCopy:
    def test_60_a_block_that_is_handed_out_again_is_not_written_before_the_copy_has_read_it(
        self, rig: Rig, cache_with_first: torch.Tensor, expect: Expect
    ) -> None:
        step = rig.begin(out((3, 1), (5, 2)), work=(feed(SECOND, (5, 3)),))
        copy = rig.waited_for()
        assert torch.equal(rig.backend.cache, cache_with_first), "the step writes before the copy is done"
        copy.release()
        assert rig.next_event() is step
        assert step.result() == expect(SECOND)
        assert torch.equal(rig.host_cache[[1, 2]], cache_with_first[[3, 5]])

    def test_60_it_is_not_written_in_a_later_step_either(
        self, rig: Rig, cache_with_first: torch.Tensor, expect: Expect
    ) -> None:
        rig.run(out((3, 1), (5, 2)))
        step = rig.begin(work=(feed(SECOND, (2, 5)),))
        rig.waited_for().release()
        assert step.result(MAX_SECONDS) == expect(SECOND)
        assert torch.equal(rig.host_cache[[1, 2]], cache_with_first[[3, 5]])

    def test_60_a_block_is_not_read_before_the_copy_has_written_it(self, rig: Rig, expect: Expect) -> None:
        rig.run(work=(feed(FIRST[:6], (3, 5)),))
        rig.run(out((3, 1), (5, 2)))
        rig.copies[0].finish()
        rig.backend.cache.fill_(torch.nan)
        step = rig.begin(back((1, 7), (2, 4)), work=(feed(FIRST[6:], (7, 4), start=6),))
        copy = rig.waited_for()
        assert copy is rig.copies[1]
        copy.release()
        assert step.result(MAX_SECONDS) == expect(FIRST)

    def test_60_copies_within_the_device_wait_like_a_step(self, rig: Rig) -> None:
        for block in range(1, 9):
            rig.backend.cache[block] = float(block)
        rig.host_cache[1] = 9.0
        within = (Copy(7, 2), Copy(5, 3))  # reads a block that the host writes, and writes one that the host reads
        step = rig.begin(Copies((Copy(3, 4),), (Copy(1, 7),), within))
        for number in range(2):
            copy = rig.waited_for()
            assert copy is rig.copies[number]
            assert (rig.backend.cache[3] == 3).all()
            copy.release()
        assert rig.next_event() is step
        assert rig.backend.cache[:, 0].tolist() == [0, 1, 9, 5, 4, 5, 6, 9, 8]
        assert (rig.host_cache[4] == 3).all()

    @pytest.mark.usefixtures("cache_with_first")
    def test_60_a_step_that_touches_none_of_its_blocks_does_not_wait(self, rig: Rig, expect: Expect) -> None:
        assert rig.run(out((3, 1)), back((2, 4)), work=(feed(SECOND, (1, 2)),)) == expect(SECOND)
        within = Copies(device_to_device=(Copy(1, 6), Copy(2, 7)))
        assert rig.run(within, work=(feed(SECOND[-1:], (6, 7), start=5),)) == expect(SECOND)

    def test_60_a_step_that_only_reads_what_a_copy_reads_does_not_wait(self, rig: Rig, expect: Expect) -> None:
        rig.run(work=(feed(FIRST[:6], (3, 5)),))
        assert rig.run(out((3, 1)), work=(feed(FIRST[6:], (3, 5), start=6),)) == expect(FIRST)

    def test_61_of_several_copies_of_a_block_the_last_one_frees_it(
        self, rig: Rig, cache_with_first: torch.Tensor, expect: Expect
    ) -> None:
        rig.run(out((3, 1)), out((3, 2), (5, 4)))
        rig.run(out((3, 3)))
        step = rig.begin(work=(feed(SECOND[:3], (3,)),))
        for copy in rig.copies:
            assert rig.next_event() is copy, "the step continues too early"
            assert torch.equal(rig.backend.cache, cache_with_first)
            copy.release()
        assert rig.next_event() is step
        assert step.result() == expect(SECOND[:3])
        for host_block in (1, 2, 3):
            assert torch.equal(rig.host_cache[host_block], cache_with_first[3])

    @pytest.mark.usefixtures("cache_with_first")
    def test_63_blocks_are_released_in_the_order_of_the_copies(self, rig: Rig, expect: Expect) -> None:
        rig.run(out((3, 1)))
        rig.run(out((5, 2)))
        first, second = rig.copies
        second.release()  # the first copy precedes it in the stream
        step = rig.begin(work=(feed(SECOND[:3], (5,)),))
        assert rig.next_event() is second
        first.release()
        assert step.result(MAX_SECONDS) == expect(SECOND[:3])

    @pytest.mark.usefixtures("cache_with_first")
    def test_63_each_block_is_released_by_its_own_copy_not_by_the_last_one(self, rig: Rig, expect: Expect) -> None:
        rig.run(out((3, 1)))
        rig.run(out((5, 2)))
        first, second = rig.copies
        first.finish()
        assert rig.run(work=(feed(SECOND[:3], (3,)),)) == expect(SECOND[:3])
        step = rig.begin(work=(feed(SECOND[3:], (5,)),))
        assert rig.next_event() is second
        second.release()
        assert step.result(MAX_SECONDS) == expect(SECOND[3:])


class TestInFlight:
    @pytest.fixture
    def stream(self) -> Iterator[HeldCopyStream]:
        stream = HeldCopyStream()
        yield stream
        stream.close()

    @pytest.fixture
    def copies(self, stream: HeldCopyStream) -> BlockCopies:
        return BlockCopies(TorchBackend(uniform(1, 1, 1), 1, 4, host_blocks=4), stream, 1)

    def test_63_finished_copies_are_dropped_in_order(self, copies: BlockCopies, stream: HeldCopyStream) -> None:
        copies.make([out((1, 1)), back((2, 2)), out((3, 3))])
        assert copies.in_flight == 3
        first, second, third = stream.copies
        for copy, remaining in ((first, 2), (second, 1), (third, 0)):
            copies.make([])
            assert copies.in_flight == remaining + 1
            copy.finish()
            copies.make([])
            assert copies.in_flight == remaining

    def test_a_result_without_copies_between_the_tiers_launches_nothing(
        self, copies: BlockCopies, stream: HeldCopyStream
    ) -> None:
        copies.make([Copies(), Copies(device_to_device=(Copy(1, 2),))])
        assert (copies.in_flight, stream.copies) == (0, [])


class TestAFailedCopy:
    def test_ends_the_step_that_waits_for_it(self, rig: Rig) -> None:
        rig.backend.fails = True
        step = rig.begin(out((3, 1)), work=(feed(FIRST, (3, 5)),))
        rig.waited_for().release()
        with pytest.raises(CopyFailed, match="block copy failed: made to fail"):
            step.result(MAX_SECONDS)

    @pytest.mark.parametrize("copies", [(), (out((2, 2)),), (Copies(device_to_device=(Copy(4, 6),)),)])
    def test_fails_the_next_plan_even_if_no_step_needs_its_blocks(self, rig: Rig, copies: tuple[Copies, ...]) -> None:
        rig.backend.fails = True
        rig.run(out((3, 1)))
        rig.copies[0].finish()
        rig.backend.fails = False
        with pytest.raises(CopyFailed, match="made to fail"):
            rig.begin(*copies, work=(feed(FIRST, (1, 2)),)).result(MAX_SECONDS)

    def test_within_the_device_is_a_failed_copy_and_no_failed_step(self, rig: Rig) -> None:
        rig.backend.fails = True
        with pytest.raises(CopyFailed, match="made to fail"):
            rig.begin(Copies(device_to_device=(Copy(1, 2),))).result(MAX_SECONDS)

    def test_at_the_launch_is_a_failed_copy(self) -> None:
        backend = TorchBackend(uniform(1, 1, 1), 1, 4)
        with pytest.raises(CopyFailed, match="swap requires a host tier"):
            BlockCopies(backend, InlineCopyStream(), 1).make([out((1, 1))])

    def test_ends_the_loop_and_fails_no_request(self) -> None:
        class NoCopies:
            def launch(self, plan: StepPlan) -> Done:
                raise CopyFailed("made to fail")

        engine = EngineInProcess(NoCopies(), Capacity(8, 50, BLOCK, 4))
        engine.submit(FIRST[:3], 2)
        engine.turn()  # requests blocks
        with pytest.raises(CopyFailed):
            engine.turn()
        assert engine.engine.last_failure is None
        assert not any(isinstance(output, Finished) for output in engine.scheduler.take_outputs())


class Twins:
    """A backend that runs random copies and steps, and a reference that copies one by one."""

    DEVICE_BLOCKS, HOST_BLOCKS, SLOTS = 6, 5, 2

    def __init__(self, seed: int, stream: CopyStream, device: torch.device) -> None:
        self._source = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._device = device
        self._backend, self._twin = (
            TorchBackend(
                uniform(2, 1, 3),
                self.SLOTS,
                self.DEVICE_BLOCKS,
                device=place,
                host_blocks=self.HOST_BLOCKS,
            )
            for place in (device, torch.device("cpu"))
        )
        self._copies = BlockCopies(self._backend, stream, self.SLOTS)
        for block in range(1, self.DEVICE_BLOCKS + 1):
            self._write(block)

    def run(self) -> None:
        for _ in range(40):
            self.copy()
            self.step()
        self.compare()

    def copy(self) -> None:
        """Run the copies of up to two results; the reference uses another order of the pairs."""
        results = [self._result() for _ in range(self._source.randrange(3))]
        for to_host, to_device, within, _ in results:
            for copy in to_host:
                self._twin.swap([copy], Direction.DEVICE_TO_HOST)
            for copy in to_device:
                self._twin.swap([copy], Direction.HOST_TO_DEVICE)
            for copy in within:
                self._twin.copy_blocks([copy])
        self._copies.make([Copies(*map(self._shuffled, result)) for result in results])

    def step(self) -> None:
        """Read the beginning of a table and write its end."""
        length = self._source.randrange(1, self.DEVICE_BLOCKS + 1)
        table = self._source.sample(range(1, self.DEVICE_BLOCKS + 1), length)
        start = self._source.randrange(length * self.SLOTS)
        self._copies.wait_for([Work(1, (0,) * (length * self.SLOTS - start), start, tuple(table), True, GREEDY)])
        read, written = table[: start // self.SLOTS], table[start // self.SLOTS :]
        assert torch.equal(self._backend.cache[read].cpu(), self._twin.cache[read])
        for block in written:
            self._write(block)

    def compare(self) -> None:
        """Wait for all copies, then compare both tiers byte for byte."""
        table = tuple(range(1, self.DEVICE_BLOCKS + 1))
        self._copies.wait_for([Work(1, (0,), 0, table, True, GREEDY)])
        assert torch.equal(self._backend.cache.cpu(), self._twin.cache)
        assert self._backend.host_cache is not None
        assert self._twin.host_cache is not None
        assert torch.equal(self._backend.host_cache, self._twin.host_cache)

    def _write(self, block: int) -> None:
        content = torch.rand(self._twin.cache.shape[1:], generator=self._generator)
        self._backend.cache[block] = content.to(self._device)
        self._twin.cache[block] = content

    def _result(self) -> Copies:
        device, host = range(1, self.DEVICE_BLOCKS + 1), range(1, self.HOST_BLOCKS + 1)
        within = self._pairs(device, device)
        destinations = {copy.destination for copy in within}
        return Copies(
            self._pairs(device, host),
            self._pairs(host, device),
            tuple(copy for copy in within if copy.source not in destinations),
        )

    def _pairs(self, sources: range, destinations: range) -> tuple[Copy, ...]:
        chosen = self._source.sample(destinations, self._source.randrange(4))
        return tuple(Copy(self._source.choice(sources), destination) for destination in chosen)

    def _shuffled(self, copies: tuple[Copy, ...]) -> tuple[Copy, ...]:
        return tuple(self._source.sample(copies, len(copies)))


class TestRandomCopiesAndSteps:
    @pytest.mark.parametrize("kind", [InlineCopyStream, LateCopyStream, UnevenCopyStream, FreeCopyStream])
    def test_equal_a_reference_that_copies_one_by_one(self, kind: type[Any]) -> None:
        stream = kind()
        for seed in range(20):
            Twins(seed, stream, torch.device("cpu")).run()
        close(stream)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
    def test_equal_a_reference_on_a_gpu(self) -> None:
        device = torch.device("cuda")
        stream = copy_stream_for(device)
        assert isinstance(stream, CudaCopyStream)
        for seed in range(25):
            Twins(seed, stream, device).run()


class StreamEngine(ModelEngine):
    def __init__(self, folder: Path, stream: CopyStream) -> None:
        sizes = {"device_blocks": 8, "host_blocks": 24, "token_budget": 16, "max_sequences": 4}
        super().__init__(folder, block_size=BLOCK, **sizes)
        self.engine._runner = ModelRunner(self.loaded, self.backend, BLOCK, stream)


@pytest.mark.parametrize("kind", [InlineCopyStream, LateCopyStream, FreeCopyStream])
def test_an_engine_generates_the_same_tokens_whenever_the_copies_run(
    tiny_model: Tiny, random_prompt: Callable[[int], list[int]], kind: type[Any]
) -> None:
    stream = kind()
    engine, prompts = StreamEngine(tiny_model("llama"), stream), [random_prompt(18) for _ in range(4)]
    expected = greedy_reference(engine.folder, prompts, 4)
    for _ in range(3):
        assert engine.generate(prompts, 4) == expected
    assert engine.engine.last_failure is None
    assert engine.blocks.session.totals.to_host_blocks > 10
    assert engine.scheduler.totals.cached_tokens == 2 * 4 * 16, "all full blocks of prompts are cached after one round"
    close(stream)


def close(stream: Any) -> None:
    if not isinstance(stream, InlineCopyStream):
        stream.close()
