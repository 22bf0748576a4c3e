"""Prompts that cannot fit are refused by their size, and nothing of them stays in memory."""

import asyncio
import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import psutil
import pytest

from quire.v1 import gateway_pb2
from tests.one_process import PRODUCT, ROOT, one_process
from tests.running_quire import RunningQuire

WORDS = 2_000_000
LARGE = "a " * WORDS
MIB = 1024 * 1024
MOST_GROWTH = 50 * MIB
# The tiny models' longest token has 10 bytes.
REFUSAL = "must have at most 2048 tokens, and so at most 20480 bytes, not "


def chat_of(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def requests_with(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return a request of each kind with a prompt of this text."""
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    called = [*chat_of("a")["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}]
    called.append({"role": "tool", "tool_call_id": "1", "content": "5"})
    return [
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": text, "stream": True}),
        ("/v1/completions", {"prompt": ["a", text]}),
        ("/v1/completions", {"prompt": [text[: len(text) // 2]] * 2, "stream": True}),
        ("/v1/completions", {"prompt": text, "echo": True}),
        ("/v1/chat/completions", chat_of(text)),
        ("/v1/chat/completions", chat_of(text, stream=True)),
        ("/v1/chat/completions", chat_of("a", tools=[tool])),
        ("/v1/chat/completions", {"messages": called}),
        ("/v1/responses", {"input": text}),
        ("/v1/responses", {"input": text, "stream": True}),
    ]


REQUESTS = requests_with(LARGE)


def gateway_of(running: RunningQuire) -> psutil.Process:
    services = psutil.Process(running.process.pid).children()
    return next(one for one in services if "gateway" in " ".join(one.cmdline()))


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=lambda one: one if isinstance(one, str) else "")
def test_a_prompt_is_refused_by_its_size(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    refused = http.post(path, json=body)
    assert refused.status_code == 400
    assert REFUSAL in refused.json()["error"]["message"]


def test_over_grpc_a_prompt_is_refused_by_its_size(tiny_quire: RunningQuire) -> None:
    with pytest.raises(Exception, match=REFUSAL):
        tiny_quire.generate(gateway_pb2.GenerateRequest(prompt=gateway_pb2.Prompt(text=LARGE[:4_000_000])))


def test_a_large_prompt_that_is_truncated_is_answered(http: httpx.Client) -> None:
    body = {"prompt": "a " * 50_000, "truncate_prompt_tokens": 8, "max_tokens": 1}
    answer = http.post("/v1/completions", json=body)
    assert answer.json()["usage"]["prompt_tokens"] == 8


@pytest.mark.parametrize(
    ("field", "count", "most"), [("messages", 8193, 8192), ("tools", 1025, 1024)], ids=["messages", "tools"]
)
def test_too_many_parts_of_a_chat_are_refused_by_name(http: httpx.Client, field: str, count: int, most: int) -> None:
    body = chat_of("a")
    tools = [{"type": "function", "function": {"name": f"f{at}"}} for at in range(count)]
    body |= {"messages": body["messages"] * count} if field == "messages" else {"tools": tools}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["message"] == f"{field} must have at most {most} entries, not {count}"
    assert error["param"] == field


def test_memory_is_flat_over_large_prompts(tiny_quire: RunningQuire, http: httpx.Client) -> None:
    """Those of /tokenize have no bound below that of the body, and use a hundred times their size."""
    gateway = gateway_of(tiny_quire)
    large = [("/tokenize", {"prompt": LARGE[:1_000_000]})] * 3 + REQUESTS
    for path, body in large:
        http.post(path, json=body)
    before = gateway.memory_info().rss
    for path, body in large:
        http.post(path, json=body)
        assert gateway.memory_info().rss - before < MOST_GROWTH, path


@contextmanager
def collected_frames(frames: list[str]) -> Iterator[None]:
    """Add the frames of the product that only a garbage collection frees."""
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        for one in gc.garbage:
            if isinstance(one, FrameType) and _is_own(Path(one.f_code.co_filename)):
                frames.append(one.f_code.co_qualname)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.collect()


def _is_own(path: Path) -> bool:
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PRODUCT


def test_a_refused_request_leaves_no_cycle_that_keeps_its_prompt(tiny_model: Callable[[str], Path]) -> None:
    """One does with the error of a task: its traceback has the frame whose variable is the task."""
    frames: list[str] = []
    text = "a " * 50_000

    async def refuse() -> None:
        with tempfile.TemporaryDirectory() as sockets:
            async with one_process(tiny_model("llama"), Path(sockets)) as client:
                for path, body in requests_with(text):
                    await client.post(path, json=body)  # what the first one imports is not of interest
                    with collected_frames(frames):
                        assert (await client.post(path, json=body)).status_code == 400

    asyncio.run(refuse())
    assert frames == []
