"""Hundreds of chats whose samples end by stop strings, one after the other: none hangs.

A call alone is the hard case: nothing else wakes the engine. If the gateway ended samples before they were forked, a
fork without children once let the engine's thread sleep although a sample was still running.
"""

import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance.conftest import Record
from tests.acceptance.repetitions import repetitions
from tests.running_quire import start_quire

CALLS = repetitions(500)
SECONDS = 20.0  # for a call that takes a fraction of one
STOPS = ["e", "a", "t", "o", " ", "n", "the", "."]
WORDS = ["Say", "the", "moon", "a", "short", "story", "of", "rain", "and", "stones"]


@pytest.mark.timeout(1800)
def test_chats_with_random_stops_samples_and_prompts_end(demo_model: Path, record: Record) -> None:
    draw = random.Random(42)
    one = start_quire("--model", str(demo_model), "--http-listen", "127.0.0.1:0")
    try:
        with httpx.Client(base_url=one.http_url, timeout=SECONDS) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            stopped = sum(_chat(client, _body(draw, model)) for _ in range(CALLS))
        record(calls=CALLS, stopped_samples=stopped)
        assert stopped > CALLS, "most samples end by a stop string"
        assert one.settled_pool().sequences == 0
    finally:
        assert one.close() == 0


def _body(draw: random.Random, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": " ".join(draw.choices(WORDS, k=draw.randint(1, 8)))}],
        "n": draw.choice([2, 3, 3, 3, 5]),
        "stop": draw.sample(STOPS, draw.randint(1, 3)),
        "seed": draw.randrange(1000),
        "temperature": 1,
        "max_tokens": 12,
    }


def _chat(client: httpx.Client, body: dict[str, Any]) -> int:
    """Return how many samples ended by a stop string. Raises httpx.ReadTimeout for a call that hangs."""
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert len(choices) == body["n"]
    return sum(choice["finish_reason"] == "stop" for choice in choices)
