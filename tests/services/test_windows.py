"""Services with a model whose layers have windows: what operators see of its kinds, and what outlives a kill."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urljoin

import grpc
import httpx
import psutil
import pytest

from quire.v1 import gateway_pb2, kvmanager_pb2
from tests.running_quire import CALL_SECONDS, START_SECONDS, RunningQuire, start_quire
from tests.scrape import Scrape

PROMPT = list(range(5, 205))  # 12 whole blocks of 16, and 8 tokens
WHOLE = 192
KIND = "window-40"


def request(tokens: list[int] = PROMPT, max_tokens: int = 12) -> gateway_pb2.GenerateRequest:
    made = gateway_pb2.GenerateRequest(sampling={"temperature": 0.0}, stopping={"max_tokens": max_tokens})  # type: ignore[arg-type]
    made.prompt.token_ids.ids.extend(tokens)
    return made


@pytest.fixture(scope="module")
def served(tiny_model: Callable[[str], Path]) -> Iterator[RunningQuire]:
    pool = ("--device-blocks", "128", "--host-blocks", "32", "--dtype", "float32", "--token-budget", "64")
    one = start_quire(
        "--model", str(tiny_model("windowed")), *pool, "--max-sequences", "4", "--map-listen", "127.0.0.1:0"
    )
    yield one
    assert one.close() == 0


def test_the_pool_describes_its_kinds(served: RunningQuire) -> None:
    [kind] = served.pool().kinds
    assert (kind.kind.name, kind.kind.tokens, kind.kind.chunked) == (KIND, 40, False)
    assert served.pool().device_blocks == 128
    # Four sequences of a window, and the tokens of two steps.
    assert kind.kind.device_blocks == 4 * 5 + 8
    assert kind.device.free + kind.device.cached == kind.kind.device_blocks


def test_the_explanation_of_a_request_says_what_left_the_window(served: RunningQuire) -> None:
    answer = served.generate(request())
    asked = kvmanager_pb2.ExplainRequest(request_id=answer.started.request_id)
    explained = served.kvmanager.Explain(asked, timeout=CALL_SECONDS)
    assert f"Its tokens 0 to 159 left the window of kind {KIND} in step" in explained.summary
    assert re.search(
        rf"It held at most 14 blocks of the layers that keep all tokens, \d+ of kind {KIND}\.$", explained.summary
    )
    trims = [event for event in explained.events if event.item == kvmanager_pb2.STEP_ITEM_TRIM]
    assert {event.kind for event in trims} == {KIND}
    left = sum(last - first + 1 for one in trims for first, last in zip(one.range_firsts, one.range_lasts, strict=True))
    assert left >= (200 - 40) // 16


def test_the_explanation_of_a_branch_names_the_kind_that_lacks_what_it_needs(served: RunningQuire) -> None:
    shared = PROMPT[:100][::-1]  # 6 whole blocks
    served.generate(request([*shared, *PROMPT[:150]]))
    branches = [served.generate(request([*shared, *PROMPT[at : at + 100]])).started for at in (50, 90)]
    asked = kvmanager_pb2.ExplainRequest(request_id=branches[0].request_id)
    assert (
        "0 of its 200 tokens were cached: 96 tokens were cached in the layers that keep all tokens, but blocks of kind "
        f"{KIND} that the next token needs were not (--retention-tokens keeps more of them)."
    ) in served.kvmanager.Explain(asked, timeout=CALL_SECONDS).summary
    assert branches[1].cached_tokens == 96


def test_a_block_of_a_kind_is_shown_by_its_name(served: RunningQuire) -> None:
    asked = kvmanager_pb2.GetBlockMapRequest(kind=KIND)
    shown = served.kvmanager.GetBlockMap(asked, timeout=CALL_SECONDS)
    assert len(shown.states) == 28
    assert kvmanager_pb2.BLOCK_STATE_CACHED in shown.states
    with pytest.raises(grpc.RpcError, match=r"kind must be empty or a window kind of the pool \(window-40\)"):
        served.kvmanager.GetBlockMap(kvmanager_pb2.GetBlockMapRequest(kind="all"), timeout=CALL_SECONDS)


def test_metrics_have_the_kind_of_blocks(served: RunningQuire) -> None:
    shown = Scrape.of(served.metrics_urls["kvmanager"])
    assert shown.values("quire_kv_pool_blocks", "kind", tier="device") == {"all": 128, KIND: 28}
    states = shown.values("quire_kv_blocks", "state", tier="device", kind=KIND)
    assert sum(states.values()) == 28


def test_a_killed_engine_finds_the_blocks_of_all_kinds(served: RunningQuire) -> None:
    text = [*PROMPT[50:], *PROMPT[:50]]
    first = served.generate(request(text))
    seen = len(served.output.lines)
    psutil.Process(served.children()["engine"]).kill()
    served.output.wait_for("engine is ready", START_SECONDS, seen)
    served.output.wait_for("serves tiny-windowed", START_SECONDS, seen)
    again = served.generate(request(text))
    assert again.started.cached_tokens == WHOLE
    assert again.token_ids == first.token_ids


def test_the_next_turn_of_a_conversation_hits_behind_the_answer(served: RunningQuire) -> None:
    text = [*PROMPT[100:], *PROMPT[:100]]
    first = served.generate(request(text, 40))
    longer = [*text, *first.token_ids, *range(20, 40)]
    assert served.generate(request(longer)).started.cached_tokens == (200 + 40 - 1) // 16 * 16


def test_the_page_names_each_kind_with_its_counts(served: RunningQuire) -> None:
    [pool] = httpx.get(urljoin(served.map_url, "api/pools"), timeout=CALL_SECONDS).json()["pools"]
    [counts] = pool["counts"]["kinds"]
    assert (counts["name"], sum(counts["device"].values())) == (KIND, 28)


def test_the_page_shows_a_block_of_a_kind(served: RunningQuire) -> None:
    place = f"api/pools/{served.pool().engine_id}/blocks/1"
    shown = httpx.get(
        urljoin(served.map_url, place), params={"tier": "device", "kind": KIND}, timeout=CALL_SECONDS
    ).json()
    assert (shown["kind"], shown["tier"]) == (KIND, "device")
    assert any(f"of kind {KIND}" in event["text"] for event in shown["events"])
