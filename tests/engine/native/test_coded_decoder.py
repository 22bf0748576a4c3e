"""Llama-shaped models run by the native kernels over a KV cache in 8 bits."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.attention.cache import CacheGeometry
from engine.model.loaded import with_kv_dtype
from engine.model.loading import load_model
from engine.native.cpu_backend import CpuBackend
from engine.native.cpu_class import NAMES
from engine.native.kernels import Kernels
from engine.run.runner import ModelRunner
from engine.schedule.limits import Preemption
from engine.schedule.request import Sampling
from services.engine.startup.native_kernels import decoder_for
from tests.cache_contents import CommittedChains
from tests.engine import native_kernels
from tests.engine.decoding import logits, prompt
from tests.engine.families import FAMILIES, Checkpoint
from tests.engine.native.test_native_decoder import differences
from tests.engine_in_process import ModelEngine

CPU = torch.device("cpu")
BLOCK = 16

Tiny = Callable[[str], Path]
Prompt = Callable[[int], list[int]]


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return native_kernels.kernels(request.param)


def runner_of(kernels: Kernels, folder: Path, blocks: int = 40, host_blocks: int = 0) -> tuple[ModelRunner, CpuBackend]:
    loaded = with_kv_dtype(load_model(folder, torch.bfloat16, CPU), torch.int8)
    sizes = (BLOCK, blocks, torch.bfloat16, host_blocks)
    backend = CpuBackend(kernels, loaded.geometry, *sizes, threads=1, kv_dtype=torch.int8)
    decoder = decoder_for(kernels, loaded, backend, 1)
    assert decoder is not None, "it matches the model's modules"
    backend.cache.zero_()  # of the comparison
    return ModelRunner(loaded, backend, BLOCK, decoder=decoder), backend


@pytest.mark.parametrize("kind", ["llama", "qwen3 with windows"])
def test_logits_over_codes_are_nearly_as_close_to_float32_as_those_of_transformers(
    kernels: Kernels, checkpoint: Checkpoint, kind: str
) -> None:
    folder = checkpoint(FAMILIES[kind])
    runner, _ = runner_of(kernels, folder)
    tokens, table = prompt(70, 1), (7, 3, 9, 1, 12)
    logits(runner, (tokens[:40], 0, table[:3]))
    ours, theirs = differences(folder, tokens, logits(runner, (tokens, 40, table))[0])
    assert ours < 1.3 * theirs + 0.03


def test_the_codes_of_a_token_do_not_depend_on_what_is_computed_with_it(kernels: Kernels, tiny_model: Tiny) -> None:
    runner, backend = runner_of(kernels, tiny_model("llama"))
    tokens, tables = prompt(70, 1), [tuple(range(5 * number + 1, 5 * number + 6)) for number in range(4)]
    logits(runner, (tokens, 0, tables[0]))
    logits(runner, (tokens[:37], 0, tables[1]), (prompt(50, 2), 0, tables[3]))
    logits(
        runner,
        (tokens, 37, tables[1]),
        *[(prompt(20, seed), 0, (2 * seed + 15, 2 * seed + 16)) for seed in range(4, 7)],
    )
    for end in range(1, len(tokens) + 1):
        logits(runner, (tokens[:end], end - 1, tables[2][: -(-end // BLOCK)]))
    for table in tables[1:3]:
        assert torch.equal(backend.cache[list(table)], backend.cache[list(tables[0])])


class CodedEngine(ModelEngine):
    """An engine in bfloat16 with codes in its cache, which records the tokens of each key."""

    def __init__(self, folder: Path, device_blocks: int, preemption: Preemption) -> None:
        self.chains = CommittedChains(BLOCK)
        super().__init__(
            folder,
            block_size=BLOCK,
            device_blocks=device_blocks,
            host_blocks=40 if preemption is Preemption.SWAP else 0,
            token_budget=48,
            max_sequences=12,
            preemption=preemption,
            observe=self.chains,
        )

    def make_backend(
        self, _geometry: CacheGeometry, _block_size: int, device_blocks: int, host_blocks: int
    ) -> CpuBackend:
        self.native, self.coded = runner_of(native_kernels.kernels(), self.folder, device_blocks, host_blocks)
        return self.coded

    def make_runner(self, _block_size: int, _ahead: bool) -> ModelRunner:
        return self.native

    def cached_blocks(self) -> dict[int, tuple[int, ...]]:
        """Return all tokens of each cached block's prefix, its own included."""
        device = self.blocks.pool.device
        keys = {block: device.key(block) for block in device.eviction_order()}
        return {block: self.chains.tokens[key] for block, key in keys.items() if key is not None}


@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SWAP])
def test_hits_copies_swaps_and_recomputation_give_the_codes_and_tokens_of_an_undisturbed_engine(
    tiny_model: Tiny, random_prompt: Prompt, preemption: Preemption
) -> None:
    folder, draw = tiny_model("llama"), random.Random(4)
    common = random_prompt(37)
    requests = [(common[: draw.randrange(38)] + random_prompt(draw.randrange(1, 30)), seed) for seed in range(10)]

    def run(device_blocks: int) -> CodedEngine:
        engine = CodedEngine(folder, device_blocks, preemption)
        for tokens, seed in requests:
            sampling = Sampling(temperature=0.8, seed=seed)
            engine.submit(tokens, 40, sampling=sampling, samples=1 + seed % 3)
            engine.turn_times(draw.randrange(3))
        engine.run()
        return engine

    roomy, tight = run(400), run(26)
    assert roomy.scheduler.totals.preemptions == 0
    assert tight.scheduler.totals.preemptions > 1
    assert (tight.scheduler.totals.swapped_tokens > 0) is (preemption is Preemption.SWAP)
    assert roomy.samples == tight.samples
    again, backend = runner_of(native_kernels.kernels(), folder)
    for engine in (roomy, tight):
        cached = engine.cached_blocks()
        assert len(cached) > 20
        for block, tokens in cached.items():
            table = tuple(range(1, len(tokens) // BLOCK + 1))
            logits(again, (tokens, 0, table))
            assert torch.equal(engine.coded.cache[block], backend.cache[table[-1]])
