"""Greedy tokens equal transformers' `generate` for several block sizes, token budgets and pools."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers

from quire.v1 import decoding_pb2, gateway_pb2
from tests.acceptance.conftest import ROOT, Record
from tests.reference import near_ties
from tests.running_quire import RunningQuire

LENGTHS = (1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 511, 700, 1000, 1500)
EOS = (2,)
CONCURRENCY = 16
LARGE = 24_576  # tokens

CASES = [
    pytest.param(block_size, budget, LARGE // block_size, 24, 0, id=f"blocks of {block_size}, budget {budget}")
    for block_size in (1, 8, 16, 64)
    for budget in (64, 2048)
]
# How many depends on the order in which the requests arrive: 5 to 10 were counted.
CASES.append(pytest.param(1, 2048, 1596, 96, 3, id="a pool of 1596 tokens, at least 3 preemptions"))


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> list[list[int]]:
    """Token ids of 24 English prompts with different starts."""
    tokenizer = tokenizers.Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    ids = tokenizer.encode((ROOT / "docs" / "architecture.md").read_text()).ids
    prompts = [ids[37 * position : 37 * position + length] for position, length in enumerate(LENGTHS)]
    return prompts[::-1]  # the longest first, so that it competes with the most neighbours in a small pool


@pytest.mark.parametrize(("block_size", "budget", "device_blocks", "max_tokens", "preemptions"), CASES)
def test_greedy_tokens_equal_those_of_transformers(
    quire: Callable[..., RunningQuire],
    prompts: list[list[int]],
    demo_model: Path,
    record: Record,
    block_size: int,
    budget: int,
    device_blocks: int,
    max_tokens: int,
    preemptions: int,
) -> None:
    running = quire(
        *("--block-size", str(block_size), "--token-budget", str(budget), "--device-blocks", str(device_blocks)),
        *("--max-sequences", str(CONCURRENCY)),
    )
    with ThreadPoolExecutor(CONCURRENCY) as clients:
        answers = list(
            clients.map(lambda prompt: running.generate(_request(prompt, max_tokens), timeout=1500), prompts)
        )
    pool = running.settled_pool()
    ties = near_ties(demo_model, prompts, [answer.token_ids for answer in answers], max_tokens, EOS)
    record(
        prompts=len(prompts),
        generated_tokens=sum(len(answer.token_ids) for answer in answers),
        near_ties=ties,
        preemptions=pool.totals.preemptions,
        evicted_blocks=pool.totals.evicted_blocks,
    )
    assert pool.totals.preemptions >= preemptions
    assert (pool.sequences, pool.device.held) == (0, 0)


def _request(prompt: list[int], max_tokens: int) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        prompt=gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=prompt)),
        sampling=decoding_pb2.Sampling(temperature=0),
        stopping=decoding_pb2.Stopping(max_tokens=max_tokens),
    )
