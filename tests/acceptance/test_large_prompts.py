"""The memory of a gateway stays flat over 200 refused prompts of two million words."""

from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

import httpx
import pytest

from tests.running_quire import CALL_SECONDS, start_quire
from tests.services.gateway.http.test_large_prompts import MIB, REQUESTS, gateway_of

PROMPTS = 200
MOST_GROWTH = 50 * MIB


@pytest.mark.parametrize("context", ["demo model", "131,072 tokens"])
def test_memory_is_flat_over_refused_prompts(context: str, demo_model: Path, tiny_model: Callable[[str], Path]) -> None:
    """In a long context prompts of this size could fit, if their tokens were long, and are tokenized."""
    long = context != "demo model"
    model = str(tiny_model("long-llama") if long else demo_model)
    running = start_quire("--model", model, "--device-blocks", "256", "--http-listen", "127.0.0.1:0")
    gateway, growth = gateway_of(running), []
    with httpx.Client(base_url=running.http_url, timeout=CALL_SECONDS) as client:
        before = 0
        for count, (path, body) in enumerate(islice(cycle(REQUESTS), PROMPTS)):
            assert client.post(path, json=body).status_code == 400
            if count == len(REQUESTS):
                before = gateway.memory_info().rss
            if count > len(REQUESTS):
                growth.append(gateway.memory_info().rss - before)
    assert running.close() == 0
    assert max(growth) < MOST_GROWTH, f"grew by {growth[-1] / MIB:.0f} MiB, {max(growth) / MIB:.0f} at most"
