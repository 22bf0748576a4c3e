"""Codes of a KV cache in 8 bits do not depend on the batch: a last bit of a sum would change most later codes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from blocks import blocks_for
from engine.model.decoder import row_unit
from engine.model.loaded import with_kv_dtype
from engine.model.loading import load_model
from engine.run.runner import ModelRunner
from engine.schedule.capacity import Capacity
from services.engine.startup.backends import BackendOptions, choose_backend
from tests.engine import native_kernels
from tests.engine.decoding import logits, prompt
from tests.engine.families import FAMILIES, Checkpoint

BLOCK = 16

Tiny = Callable[[str], Path]
Feed = tuple[tuple[int, ...], int, tuple[int, ...]]


@pytest.fixture(params=[1, 2], autouse=True, ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def runner_of(folder: Path, blocks: int, dtype: torch.dtype = torch.float32) -> tuple[ModelRunner, torch.Tensor]:
    """Return a runner and its cache. Skip the test if no multiple of rows has products of its own."""
    loaded = with_kv_dtype(load_model(folder, dtype, torch.device("cpu")), torch.int8)
    if dtype == torch.float32 and row_unit(loaded.model) is None:
        pytest.skip("this CPU's products of a row depend on the other rows")
    capacity = Capacity(loaded.context_tokens, loaded.vocabulary_size, BLOCK, blocks)
    options = BackendOptions("cpu", loaded, capacity, native_kernels.kernels(), max_sequences=8, token_budget=1024)
    backend, decoder, *_ = choose_backend(options)
    return ModelRunner(loaded, backend, BLOCK, decoder=decoder), backend.cache


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether logits differ by roundings of their own product only."""
    return float((found - expected).abs().max() / expected.std()) < 1e-5


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
        assert close(together[0], alone[end - first - 1]), end
    logits(runner, fed(1, 37, 0))
    assert close(logits(runner, fed(1, length, 37))[0], alone[-1])
    assert torch.equal(cache[list(tables[1])], cache[list(tables[0])])
    assert torch.equal(cache[list(tables[2])], cache[list(tables[0])])


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_codes_and_logits_of_a_token_do_not_depend_on_the_batch(tiny_model: Tiny, family: str) -> None:
    runner, cache = runner_of(tiny_model(family), blocks=9 * 38 + 1)
    check_in_batches(runner, cache, length=600, first=580)


@pytest.mark.parametrize("kind", ["qwen3 with windows", "gemma2", "phi3", "gpt_neox"])
def test_neither_do_those_of_other_families(checkpoint: Checkpoint, kind: str) -> None:
    runner, cache = runner_of(checkpoint(FAMILIES[kind]), blocks=9 * 6 + 1)
    check_in_batches(runner, cache, length=90, first=70)


def test_neither_do_those_of_a_model_that_the_kernels_run_as_a_whole(tiny_model: Tiny) -> None:
    runner, cache = runner_of(tiny_model("llama"), blocks=9 * 38 + 1, dtype=torch.bfloat16)
    check_in_batches(runner, cache, length=600, first=580)


def test_products_of_rows_in_multiples_of_the_unit_do_not_depend_on_the_others(tiny_model: Tiny) -> None:
    model = load_model(tiny_model("llama"), torch.float32, torch.device("cpu")).model
    unit = row_unit(model)
    assert unit is not None
    rows = torch.randn(20 * unit, model.config.hidden_size)
    with torch.inference_mode():
        matrix = model.model.layers[0].mlp.up_proj
        whole = matrix(rows)
        for count in range(unit, 20 * unit, unit):
            assert torch.equal(matrix(rows[:count]), whole[:count])
