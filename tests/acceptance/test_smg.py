"""The router smg in front of two engines over gRPC: the same answers as a gateway's, and the caches that it knows."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import httpx
import pytest

from quire.v1 import kvmanager_pb2, kvmanager_pb2_grpc
from tests.acceptance.conftest import Record
from tests.acceptance.router_environments import router_environment
from tests.acceptance.running_smg import RunningSmg, announced_blocks
from tests.load import SLOW_SEED
from tests.running_quire import CALL_SECONDS, RunningService

COLOURS = [{"role": "user", "content": "Name three colours."}]
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "rain": {"type": "boolean"}},
    "required": ["city", "rain"],
    "additionalProperties": False,
}
SECONDS = 60.0


class Cluster(NamedTuple):
    """Two engines of one KV manager, a gateway and smg in front of both."""

    engines: list[RunningService]
    kvmanager: RunningService
    smg: RunningSmg
    gateway_url: str
    options: tuple[str, ...]

    def smg_answer(self, path: str = "/v1/chat/completions", **body: Any) -> Any:
        return answer_of(self.smg.url + path, body)

    def gateway_answer(self, path: str = "/v1/chat/completions", **body: Any) -> Any:
        return answer_of(self.gateway_url + path, body)

    def held_blocks(self) -> int:
        stub = kvmanager_pb2_grpc.KVManagerStub(self.kvmanager.channel)
        pools = stub.ListPools(kvmanager_pb2.ListPoolsRequest(), timeout=CALL_SECONDS).pools
        return sum(pool.device.held for pool in pools)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("smg")
    with ExitStack() as running:

        def start(label: str, *arguments: str) -> RunningService:
            return running.enter_context(closing(RunningService(label, *arguments)))

        manager = start("kvmanager", "--listen", f"unix:{folder}/kvmanager.sock")
        options = ("--kvmanager", manager.address, "--model", "demo", "--device-blocks", "512", "--smg")
        engines = [start("engine", "--listen", "127.0.0.1:0", "--engine-id", f"e{at}", *options) for at in range(2)]
        for one in engines:
            one.output.wait_for("engine is ready")
        addresses = [one.address for one in engines]
        gateway = start(
            "gateway",
            *("--listen", f"unix:{folder}/gateway.sock", "--http-listen", "127.0.0.1:0"),
            *("--engines", ",".join(addresses)),
        )
        gateway.output.wait_for("gateway is ready")
        url = gateway.output.wait_for("gateway listens for HTTP at ").split(" at ")[1]
        smg = running.enter_context(closing(RunningSmg(addresses)))
        yield Cluster(engines, manager, smg, url, options)


def answer_of(url: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(url, json={"model": "demo", **body}, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(url: str, body: dict[str, Any]) -> list[Any]:
    answer = httpx.post(f"{url}/v1/chat/completions", json={"model": "demo", "stream": True, **body}, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def until(holds: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not {what} after {seconds} s"
        time.sleep(0.1)


def compared(answer: Any) -> Any:
    """Return of an answer what smg and a gateway have in common."""
    usage = answer["usage"]
    choices = [(one["message"]["content"], one["finish_reason"]) for one in answer["choices"]]
    return choices, usage["prompt_tokens"], usage["completion_tokens"]


def session(number: int, turns: int) -> str:
    """Return a text that begins as the earlier turns of the session."""
    return "".join(f"Session {number}, turn {turn}: blocks of keys and values. " for turn in range(turns))


SAME_ANSWERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "stop string": {"temperature": 0, "stop": [" obvious", "never"]},
    "samples": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 11, "n": 3},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "min_p": {"temperature": 1.1, "min_p": 0.05, "seed": 5},
    "schema": {
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}},
    },
    "stop token": {"temperature": 0, "stop_token_ids": [28]},
}


@pytest.mark.parametrize("name", SAME_ANSWERS)
def test_the_answers_are_those_of_a_gateway(cluster: Cluster, name: str) -> None:
    body: dict[str, Any] = {"messages": COLOURS, "max_tokens": 40, **SAME_ANSWERS[name]}
    assert compared(cluster.smg_answer(**body)) == compared(cluster.gateway_answer(**body))


def test_a_streamed_answer_is_that_of_a_gateway(cluster: Cluster) -> None:
    body: dict[str, Any] = {
        "messages": COLOURS,
        "max_tokens": 40,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    texts = []
    for url in (cluster.smg.url, cluster.gateway_url):
        *parts, last = events_of(url, body)
        choices = [choice for part in parts for choice in part["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        texts.append((text, choices[-1]["finish_reason"], last["usage"]["completion_tokens"]))
    assert texts[0] == texts[1]
    assert texts[0][2] == 40


def test_log_probabilities_are_those_of_a_gateway(cluster: Cluster) -> None:
    body: dict[str, Any] = {"messages": COLOURS, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    own, other = (ask(**body)["choices"][0]["logprobs"] for ask in (cluster.smg_answer, cluster.gateway_answer))
    for mine, theirs in zip(own["content"], other["content"], strict=True):
        assert mine["token"] == theirs["token"]
        assert [top["token"] for top in mine["top_logprobs"]] == [top["token"] for top in theirs["top_logprobs"]]
        assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=1e-3)


def test_a_named_tool_is_called_with_arguments_of_its_schema(cluster: Cluster) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    choice = {"type": "function", "function": {"name": "weather"}}
    body: dict[str, Any] = {
        "messages": COLOURS,
        "tools": [tool],
        "tool_choice": choice,
        "max_tokens": 60,
        "temperature": 0,
    }
    (call,) = cluster.smg_answer(**body)["choices"][0]["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "weather"
    assert set(arguments) == {"city", "rain"}


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"max_tokens": 100_000}, 400, "sampling_params.max_tokens"),
        ({"regex": "("}, 400, "sampling_params.regex"),
        ({"ebnf": 'root ::= "a"'}, 501, "sampling_params.grammar"),
    ],
)
def test_a_refusal_reaches_the_client_with_the_name_of_the_field(
    cluster: Cluster, body: dict[str, Any], status: int, field: str
) -> None:
    url = f"{cluster.smg.url}/v1/chat/completions"
    answer = httpx.post(url, json={"model": "demo", "messages": COLOURS, **body}, timeout=SECONDS)
    assert answer.status_code == status
    assert field in answer.json()["error"]["message"]


def test_conversations_return_to_the_engine_that_has_their_beginning(cluster: Cluster, record: Record) -> None:
    record(versions=router_environment("smg").versions())
    prompt_tokens = cached_tokens = 0
    for turn in range(1, 7):
        for number in range(8):
            text = session(number, 8 * turn)
            usage = cluster.smg_answer("/v1/completions", prompt=text, max_tokens=4, temperature=0)["usage"]
            if turn > 1:
                prompt_tokens += usage["prompt_tokens"]
                cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
    # Of a turn, all but the new part and the last block of the earlier one.
    record(hit_rate=cached_tokens / prompt_tokens)
    assert cached_tokens > 0.6 * prompt_tokens


def index_is_that_of_the_engines(cluster: Cluster) -> bool:
    return cluster.smg.indexed_blocks() == {one.address: announced_blocks(one.address) for one in cluster.engines}


def test_the_index_of_smg_has_the_blocks_of_each_engine(cluster: Cluster) -> None:
    for number in range(24):  # more than the pools hold
        cluster.smg_answer("/v1/completions", prompt=session(100 + number, 60), max_tokens=2, temperature=0)
    until(lambda: index_is_that_of_the_engines(cluster), "equal")
    assert all(count > 0 for count in cluster.smg.indexed_blocks().values())


def test_a_client_that_disconnects_frees_the_blocks(cluster: Cluster) -> None:
    body: dict[str, Any] = {"model": "demo", "messages": COLOURS, "stream": True, "seed": SLOW_SEED, "max_tokens": 2000}
    with httpx.stream("POST", f"{cluster.smg.url}/v1/chat/completions", json=body, timeout=SECONDS) as answer:
        next(answer.iter_lines())
        assert cluster.held_blocks() > 0
    until(lambda: cluster.held_blocks() == 0, "free")


def test_smg_goes_on_with_the_other_engine_and_takes_the_first_back(cluster: Cluster) -> None:
    lost, address = cluster.engines[0], cluster.engines[0].address
    body: dict[str, Any] = {"messages": COLOURS, "max_tokens": 10, "temperature": 0}
    expected = compared(cluster.smg_answer(**body))
    lost.kill()
    for _ in range(12):
        assert compared(cluster.smg_answer(**body)) == expected
    again = RunningService("engine", "--listen", address, "--engine-id", "e0", *cluster.options)
    cluster.engines[0] = again
    try:
        again.output.wait_for("engine is ready")
        until(lambda: cluster.smg.indexed_blocks().get(address) == announced_blocks(address), "equal")
        until(lambda: takes_requests(cluster, again), "used")
        os.kill(again.process.pid, signal.SIGTERM)  # it drains
        for _ in range(12):
            assert compared(cluster.smg_answer(**body)) == expected
        assert again.ended() == 0
    finally:
        again.close()


def takes_requests(cluster: Cluster, engine: RunningService) -> bool:
    """Send requests without a common beginning, and return whether the engine has computed any."""
    text = session(time.monotonic_ns(), 8)
    cluster.smg_answer("/v1/completions", prompt=text, max_tokens=2, temperature=0)
    return announced_blocks(engine.address) > 0
