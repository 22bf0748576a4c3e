"""The decoder of ranks with its collectives, on a GPU (NCCL) or under Triton's interpreter (gloo): as the only rank."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from blocks import blocks_for
from engine.model.loading import load_model
from engine.parallel import TorchRanks
from engine.parallel.loading import ModelFolder
from engine.run.runner import ModelRunner
from engine.schedule.capacity import Capacity
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.step_plan import Work
from tests.engine.decoding import logits, prompt
from tests.engine.families import Checkpoint
from tests.engine.gpu.test_gpu_decoder import BLOCK, GRAPHS, RECORDER, check_batches, two_layers
from tests.engine.triton_case import DEVICE, make_triton_backend
from tests.engine_in_process import GREEDY, EngineInProcess

pytest.importorskip("triton")

from engine.attention import TorchBackend
from engine.attention.backend import AttentionBackend
from engine.gpu.graphs import RecordedDecoder, Recorder, batch_sizes

SECONDS = 60.0
PROMPTS = [(prompt(20, 1), (1, 2)), (prompt(5, 2), (3,)), (prompt(33, 3), (4, 5, 6))]


@pytest.fixture(scope="module")
def ranks() -> Iterator[TorchRanks]:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=SECONDS))
    ranks = TorchRanks(0, 1, store, DEVICE, SECONDS)
    yield ranks
    ranks.close()


class Rank:
    """The only rank of a model, and the same model as one process loads it."""

    def __init__(self, folder: Path, ranks: TorchRanks, *, fused: bool = False) -> None:
        self.whole = load_model(folder, torch.float32, DEVICE)
        mine = ModelFolder(folder, 1).load(ranks, torch.float32, DEVICE)
        self.loaded = mine.loaded
        self.ranks = ranks
        self.backend = self._backend(fused=fused)
        self.decoder = mine.decoder(self.backend)

    def recorded(self, recorder: Recorder = RECORDER, sequences: int = 4) -> RecordedDecoder:
        blocks = blocks_for(self.loaded.context_tokens, BLOCK)
        return RecordedDecoder(self.decoder, recorder, BLOCK, blocks, batch_sizes(sequences), DEVICE)

    def _backend(self, *, fused: bool) -> AttentionBackend:
        if fused or DEVICE.type == "cuda":
            return make_triton_backend()(self.loaded.geometry, BLOCK, 40, torch.float32)
        return TorchBackend(self.loaded.geometry, BLOCK, 40)


@pytest.fixture
def rank(tiny_model: Callable[[str], Path], ranks: TorchRanks) -> Rank:
    return Rank(tiny_model("llama"), ranks)


def test_logits_of_a_slice_are_those_of_the_models_modules(rank: Rank) -> None:
    reference = ModelRunner(rank.whole, TorchBackend(rank.whole.geometry, BLOCK, 40, torch.float32, DEVICE), BLOCK)
    ours = ModelRunner(rank.loaded, rank.backend, BLOCK, decoder=rank.decoder)
    parts = [(tokens, 0, table) for tokens, table in PROMPTS]
    torch.testing.assert_close(logits(ours, *parts), logits(reference, *parts), rtol=1e-4, atol=1e-4)


def test_a_recorded_step_contains_its_collectives(rank: Rank) -> None:
    recorded = rank.recorded()
    recorded.prepare(lambda done, of: None)
    ours = ModelRunner(rank.loaded, rank.backend, BLOCK, decoder=recorded)
    launched = ModelRunner(rank.loaded, rank.backend, BLOCK, decoder=rank.decoder)
    check_batches(ours, launched, PROMPTS, (3, 1, 2))


def test_a_recorded_step_with_few_launches_contains_its_collectives(checkpoint: Checkpoint, ranks: TorchRanks) -> None:
    rank = Rank(checkpoint(two_layers("llama")), ranks, fused=True)
    before = ranks.collectives
    recorded = rank.recorded(GRAPHS, 2)
    recorded.prepare(lambda done, of: None)
    assert ranks.collectives > before
    ours, launched = (ModelRunner(rank.loaded, rank.backend, BLOCK, decoder=one) for one in (recorded, rank.decoder))
    check_batches(ours, launched, PROMPTS[:2], (2, 1))


def test_tokens_are_shared_a_step_ahead(rank: Rank) -> None:
    found = []
    for decoder, ahead in ((rank.decoder, False), (rank.recorded(), True)):
        share = rank.ranks.broadcast if ahead else (lambda tokens: tokens)
        runner = ModelRunner(rank.loaded, rank.backend, BLOCK, decoder=decoder, share=share)
        engine = EngineInProcess(
            runner, Capacity(rank.loaded.context_tokens, rank.loaded.vocabulary_size, BLOCK, 40), ahead=ahead
        )
        for number in range(4):
            sampling = GREEDY if number % 2 else Sampling(1.2, seed=number)
            engine.take(Request(f"r{number}", prompt(4 + 7 * number, number), sampling, Stopping(6 + number)))
        engine.run()
        found.append(engine.tokens)
    assert found[0] == found[1]


@pytest.mark.parametrize("fused", [True, False])
def test_logits_have_the_type_that_the_sampler_is_compiled_for(
    tiny_model: Callable[[str], Path], ranks: TorchRanks, *, fused: bool
) -> None:
    mine = ModelFolder(tiny_model("llama"), 1).load(ranks, torch.bfloat16, DEVICE)
    kind = make_triton_backend() if fused else partial(TorchBackend, device=DEVICE)
    backend = kind(mine.loaded.geometry, BLOCK, 4, torch.bfloat16)
    runner = ModelRunner(mine.loaded, backend, BLOCK, decoder=mine.decoder(backend))
    work = (Work(1, (5, 6), 0, (1,), True, GREEDY),)
    assert runner.forward(work).dtype == mine.loaded.dtype == torch.bfloat16
