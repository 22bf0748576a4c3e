"""Models in float32 run by their modules over a KV cache in 8 bits."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from blocks import blocks_for
from engine.model.decoder import ModulesDecoder, row_unit
from engine.model.loaded import with_kv_dtype
from engine.model.loading import load_model
from engine.native.cpu_backend import CpuBackend
from engine.run.runner import ModelRunner
from tests.engine import native_kernels
from tests.engine.decoding import logits, prompt
from tests.engine.families import FAMILIES, Checkpoint

BLOCK = 16

Tiny = Callable[[str], Path]
Feed = tuple[tuple[int, ...], int, tuple[int, ...]]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def runner_of(folder: Path, threads: int, blocks: int) -> tuple[ModelRunner, torch.Tensor]:
    """Return a runner and its cache. Skip the test if no multiple of rows has products of its own."""
    loaded = with_kv_dtype(load_model(folder, torch.float32, torch.device("cpu")), torch.int8)
    sizes = (BLOCK, blocks, torch.float32)
    kernels = native_kernels.kernels()
    backend = CpuBackend(kernels, loaded.geometry, *sizes, threads=threads, kv_dtype=torch.int8)
    if (unit := row_unit(loaded.model)) is None:
        pytest.skip("this CPU's products of a row depend on the other rows")
    return ModelRunner(loaded, backend, BLOCK, decoder=ModulesDecoder(loaded, backend, unit)), backend.cache


def check_in_batches(runner: ModelRunner, cache: torch.Tensor, length: int, first: int) -> None:
    """Compare codes and logits of tokens that are fed one by one alone, so with others, and as a prompt in chunks."""
    tokens, others = prompt(length, 1), [prompt(length, seed) for seed in range(2, 8)]
    width = blocks_for(length, BLOCK)
    tables = [tuple(range(1 + width * number, 1 + width * (number + 1))) for number in range(9)]

    def fed(number: int, end: int, start: int) -> Feed:
        whole = others[number - 3] if number > 2 else tokens
        return whole[:end], start, tables[number][: blocks_for(end, BLOCK)]

    for number in (0, *range(2, 9)):
        logits(runner, fed(number, first, 0))
    alone = [logits(runner, fed(0, end, end - 1))[0] for end in range(first + 1, length + 1)]
    for end in range(first + 1, length + 1):
        together = logits(runner, fed(2, end, end - 1), *(fed(number, end, end - 1) for number in range(3, 9)))
        assert torch.equal(together[0], alone[end - first - 1]), end
    logits(runner, fed(1, 37, 0))
    assert torch.equal(logits(runner, fed(1, length, 37))[0], alone[-1])
    assert torch.equal(cache[list(tables[1])], cache[list(tables[0])])
    assert torch.equal(cache[list(tables[2])], cache[list(tables[0])])


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_codes_and_logits_of_a_token_do_not_depend_on_the_batch(tiny_model: Tiny, threads: int, family: str) -> None:
    runner, cache = runner_of(tiny_model(family), threads, blocks=9 * 38 + 1)
    check_in_batches(runner, cache, length=600, first=580)


@pytest.mark.parametrize("kind", ["qwen3 with windows", "gemma2", "phi3", "gpt_neox"])
def test_neither_do_those_of_other_families(checkpoint: Checkpoint, threads: int, kind: str) -> None:
    runner, cache = runner_of(checkpoint(FAMILIES[kind]), threads, blocks=9 * 6 + 1)
    check_in_batches(runner, cache, length=90, first=70)


def test_products_of_rows_in_multiples_of_the_unit_do_not_depend_on_the_others(tiny_model: Tiny, threads: int) -> None:
    model = load_model(tiny_model("llama"), torch.float32, torch.device("cpu")).model
    unit = row_unit(model)
    assert unit is not None
    rows = torch.randn(20 * unit, model.config.hidden_size)
    with torch.inference_mode():
        whole = model.lm_head(rows)
        for count in range(unit, 20 * unit, unit):
            assert torch.equal(model.lm_head(rows[:count]), whole[:count])
