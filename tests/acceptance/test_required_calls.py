"""Required calls of the demo model, in six dialects: 1,000 calls of tools with 40 schemas."""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import combinations
from typing import Any

import httpx
import jsonschema
import pytest

from tests.acceptance import guided_languages
from tests.acceptance.conftest import Record
from tests.acceptance.guided_languages import LANGUAGES
from tests.running_quire import RunningService, start_quire

CALLS = 1000
SCHEMAS_COUNT = 40
MAX_TOKENS = 160
AT_ONCE = 12
LEAST_FINISHED = 0.95
# By vLLM's names of the parsers, Quire's names of the formats.
NAMES = {
    "hermes": "hermes",
    "mistral": "mistral",
    "deepseek_v31": "deepseek-v3.1",
    "kimi_k2": "kimi-k2",
    "llama3_json": "llama3",
    "granite": "granite",
}
DIALECTS = tuple(NAMES)
WHOLE = {name: task for name, task in LANGUAGES.items() if task.schema is not True}


def _schemas() -> list[tuple[str, dict[str, Any]]]:
    """Return prompts, and schemas of tools: each language as an argument, and pairs of them as two."""
    single = [(task.prompt, guided_languages.record(value=task.schema)) for task in WHOLE.values()]
    pairs = combinations(list(WHOLE.values())[:8], 2)
    double = [
        (f"{one.prompt} {other.prompt}", guided_languages.record(first=one.schema, second=other.schema))
        for one, other in pairs
    ]
    return [*single, *double][:SCHEMAS_COUNT]


SCHEMAS = _schemas()


@pytest.fixture(scope="module")
def gateways() -> Iterator[dict[str, str]]:
    """Gateways of one engine, by the dialect in which each holds it to calls."""
    with ExitStack() as stack:
        demo = stack.enter_context(closing(start_quire("--model", "demo")))
        urls = {}
        for dialect in DIALECTS:
            options = ("--engines", demo.addresses["engine"], "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")
            one = RunningService("gateway", *options, "--tool-call-parser", dialect)
            stack.callback(one.close)
            one.output.wait_for(f"calls of tools: {NAMES[dialect]}")  # the engine is connected
            urls[dialect] = one.output.wait_for("gateway listens for HTTP at ").split(" at ")[1]
        yield urls


def _called(gateways: dict[str, str], number: int) -> str:
    """Require one call; return how it ended: finished, or cut. Fails if it is not valid."""
    dialect = DIALECTS[number % len(DIALECTS)]
    prompt, schema = SCHEMAS[number // len(DIALECTS) % len(SCHEMAS)]
    function = {"name": f"answer_{number % 3}", "description": "Takes the answer.", "parameters": schema}
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": MAX_TOKENS,
        "seed": number,
        "temperature": 1,
    }
    answer = httpx.post(f"{gateways[dialect]}/v1/chat/completions", json=body, timeout=600)
    assert answer.status_code == 200, (dialect, schema, answer.text)
    choice = answer.json()["choices"][0]
    assert choice["message"]["content"] in (None, ""), (dialect, choice)
    if choice["finish_reason"] == "length":
        return "cut"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == function["name"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    return "finished"


def test_1000_required_calls_in_six_dialects_are_valid(gateways: dict[str, str], record: Record) -> None:
    assert len(SCHEMAS) == SCHEMAS_COUNT
    with ThreadPoolExecutor(AT_ONCE) as threads:
        ends = Counter(threads.map(lambda number: _called(gateways, number), range(CALLS)))
    record(**ends)
    assert ends["finished"] >= LEAST_FINISHED * CALLS, ends
