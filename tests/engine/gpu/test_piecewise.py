"""Steps with prompts by captured pieces, as CUDA graphs on a GPU or on a tape under Triton's interpreter."""

import gc
from itertools import pairwise

import pytest
import torch

from engine.attention.backend import PagedBatch
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from engine.run.runner import ModelRunner
from engine.schedule.step_plan import StepPlan, Work
from tests.engine.decoding import logits, prompt
from tests.engine.families import Checkpoint
from tests.engine.gpu.test_gpu_decoder import BLOCK, GRAPHS, two_layers
from tests.engine.launch_tape import MemoryFreed
from tests.engine.triton_case import DEVICE, make_triton_backend
from tests.engine_in_process import GREEDY

pytest.importorskip("triton")

from engine.gpu.llama import LlamaDecoder
from engine.gpu.piecewise import PiecewiseDecoder, step_sizes
from engine.gpu.triton_backend import TritonBackend

Part = tuple[tuple[int, ...], int, tuple[int, ...]]
SIZES = [3, 6]
LONG, SHORT, OTHER = prompt(20, 1), prompt(6, 2), prompt(9, 3)


class Launched:
    """A decoder whose steps are noted."""

    integers = LlamaDecoder.integers

    def __init__(self, decoder: LlamaDecoder) -> None:
        self.decoder = decoder
        self.fed: list[tuple[int, ...]] = []

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        self.fed.append(batch.fed)
        return self.decoder.logits(token_ids, positions, places, batch)


class Model:
    """A model whose steps are launched, and recorded by pieces; each decoder has a cache of its own."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.caches = [make_triton_backend()(loaded.geometry, BLOCK, 12, torch.float32) for _ in range(2)]
        ours, reference = (LlamaDecoder.of_model(loaded.model, cache, loaded.context_tokens) for cache in self.caches)
        self.others = Launched(ours)
        self.pieces = PiecewiseDecoder(ours, self.others, GRAPHS, SIZES)
        self.runners = [
            ModelRunner(loaded, cache, BLOCK, decoder=decoder)
            for cache, decoder in zip(self.caches, (self.pieces, reference), strict=True)
        ]

    @property
    def cache(self) -> TritonBackend:
        return self.caches[0]

    def compare(self, *parts: Part) -> None:
        found, expected = (logits(runner, *parts) for runner in self.runners)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def model(checkpoint: Checkpoint) -> Model:
    """A model of which nothing was captured yet."""
    return Model(load_model(checkpoint(two_layers("qwen2 with windows")), torch.float32, DEVICE))


@pytest.fixture(scope="module")
def captured(checkpoint: Checkpoint) -> Model:
    model = Model(load_model(checkpoint(two_layers("qwen2 with windows")), torch.float32, DEVICE))
    model.pieces.prepare(lambda done, of: gc.collect())
    assert not model.cache.cache[1:].any(), "the captures wrote to block 0 only"
    return model


@pytest.fixture
def prepared(captured: Model) -> Model:
    """A model of which all sizes were captured, with empty caches."""
    for cache in captured.caches:
        cache.cache.zero_()
    captured.others.fed.clear()
    return captured


def test_prompts_give_the_logits_of_launched_steps_alone_behind_prefixes_and_beside_decoding(prepared: Model) -> None:
    prepared.compare((LONG[:2], 0, (1, 2)))
    prepared.compare((LONG[:4], 2, (1, 2)), (SHORT[:3], 0, (3,)))
    prepared.compare((LONG[:6], 4, (1, 2)), (SHORT[:4], 3, (3,)), (OTHER[:2], 0, (5,)))
    prepared.compare((SHORT[:5], 4, (3,)), (OTHER[:4], 2, (5,)))
    assert not prepared.others.fed
    prepared.compare((LONG[:13], 6, (1, 2)))
    prepared.compare((LONG[:14], 13, (1, 2)), (SHORT[:6], 5, (3,)))
    assert prepared.others.fed == [(7,), (1, 1)], "a step of more tokens, and one that only decodes"


def test_padding_rows_write_to_block_0_only_and_leave_no_trace_in_other_rows(prepared: Model) -> None:
    prepared.cache.cache[7].fill_(float("nan"))  # a prefix of no meaning, so that all behind it is NaN
    broken = logits(prepared.runners[0], (SHORT[:2], 0, (3,)), (LONG[:7], 3, (7,)))
    assert broken.isnan().any()
    prepared.cache.cache[7].zero_()
    prepared.compare((SHORT[:4], 0, (3,)))
    assert not prepared.cache.cache[[1, 2, *range(4, 13)]].any(), "what the step before fed is not written again"


def test_sizes_are_captured_largest_first_until_the_time_is_over(model: Model) -> None:
    progress: list[tuple[int, int]] = []
    model.pieces.prepare(lambda done, of: progress.append((done, of)), lambda: not progress)
    assert progress == [(1, 2)]
    assert model.pieces.captured == [6]
    model.compare((LONG[:3], 0, (1, 2)))
    model.compare((LONG[:7], 3, (1, 2)))
    assert model.others.fed == [(3,)], "its size was not captured, and a larger one would be mostly padding"


def test_a_chunk_that_needs_no_logits_is_written_to_the_cache(prepared: Model) -> None:
    one = StepPlan(0, (), (Work(1, LONG[:3], 0, (1,), False, GREEDY),))
    for runner in prepared.runners:
        assert not runner.launch(one).result()
    assert not prepared.others.fed
    torch.testing.assert_close(*(cache.cache[1] for cache in prepared.caches))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the tape finds it on the CPU")
def test_memory_that_is_replaced_after_the_capture_is_found(model: Model) -> None:
    model.pieces.prepare(lambda done, of: None, iter((True, False)).__next__)
    model.cache.resize(20)
    with pytest.raises(MemoryFreed):
        model.compare((LONG[:5], 0, (1, 2)))


def test_the_largest_size_is_what_the_device_computes_while_its_layers_are_launched() -> None:
    llama_8b, half_a_billion = (32, 6_979_321_856), (24, 357_826_560)
    free = [16, 32, 64, 128, 192, 256]
    assert step_sizes(*llama_8b, 2048) == free, "145 tokens, but padding costs nothing below 256"
    assert step_sizes(*half_a_billion, 8192)[-1] == 2048
    assert step_sizes(16, 973_078_528, 2048) == [*free, 320, 384, 448, 512]
    assert step_sizes(*llama_8b, 100) == [16, 32, 64, 100]
    assert step_sizes(*llama_8b, 5) == [5]
    for budget in range(1, 2049):
        sizes = step_sizes(*half_a_billion, budget)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == budget
    behind = [(one, after) for one, after in pairwise(sizes) if after > 256]
    assert all(after - one <= after / 5 for one, after in behind)
