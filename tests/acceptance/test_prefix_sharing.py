"""The demo model computes a shared prefix once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers

from quire.v1 import decoding_pb2, gateway_pb2
from tests.acceptance.conftest import ROOT, Record
from tests.running_quire import RunningQuire

MAX_TOKENS = 16
PREFIX = 512


@pytest.fixture(scope="module")
def text_ids(demo_model: Path) -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    return tokenizer.encode((ROOT / "docs" / "architecture.md").read_text()).ids


def test_a_second_request_with_the_same_512_tokens_computes_only_its_own_part(
    demo_quire: RunningQuire, text_ids: list[int], record: Record
) -> None:
    prefix = text_ids[:PREFIX]
    second = [*prefix, *text_ids[900:930]]
    uncached = demo_quire.generate(_request(second, salt="apart"))
    demo_quire.generate(_request([*prefix, *text_ids[700:740]]))
    cached = demo_quire.generate(_request(second))
    record(
        cached_tokens=cached.started.cached_tokens,
        uncached_first_token_ms=uncached.finished.timing.time_to_first_token.ToMilliseconds(),
        cached_first_token_ms=cached.finished.timing.time_to_first_token.ToMilliseconds(),
    )
    assert uncached.started.cached_tokens == 0
    assert cached.started.cached_tokens == PREFIX
    assert cached.token_ids == uncached.token_ids


def test_eight_identical_prompts_sent_together_compute_the_prefix_once(
    demo_quire: RunningQuire, text_ids: list[int], record: Record
) -> None:
    prompt = text_ids[2000:2600]
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda _: demo_quire.generate(_request(prompt)), range(8)))
    cached = sorted(answer.started.cached_tokens for answer in answers)
    record(prompt_tokens=len(prompt), cached_tokens=cached)
    shared = (len(prompt) - 1) // 16 * 16
    assert cached == [0, *[shared] * 7]
    assert len({tuple(answer.token_ids) for answer in answers}) == 1


def _request(prompt: list[int], salt: str = "") -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        prompt=gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=prompt)),
        sampling=decoding_pb2.Sampling(temperature=0),
        stopping=decoding_pb2.Stopping(max_tokens=MAX_TOKENS),
        cache=gateway_pb2.CacheOptions(salt=salt),
    )
