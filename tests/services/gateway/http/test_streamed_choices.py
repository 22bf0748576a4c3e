"""Every stream of several choices has the choices, log-probabilities and counts of the whole answer."""

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.v1 import decoding_pb2, engine_pb2, gateway_pb2
from services.gateway.sample_output import SampleOutput
from services.gateway.text.text_stream import TextStream
from services.gateway.text.tokenizer import Tokenizer
from tests.services.gateway.http.responses import events
from tests.services.gateway.http.scripted_server import PROMPT_TOKENS, ScriptedServer
from tests.services.gateway.http.test_thoughts import TEMPLATE, TOOLS

OPTIONS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ASKED = {
    COMPLETIONS: {"prompt": "x", "logprobs": 3},
    CHATS: {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 3},
}
SCORES = {COMPLETIONS: ("tokens", "token_logprobs", "top_logprobs", "text_offset"), CHATS: ("content",)}
CALL = '<tool_call>{"name": "now", "arguments": {"a": "\N{ROLLER SKATE}"}}</tool_call>'
PIECES = ("<think>", "</think>", CALL, "\N{ROLLER SKATE}", "\N{TAMIL LETTER KA}", "\n", "stop", "st", " and ", "<tool")


@pytest.fixture(scope="module")
def server(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(tiny_model("llama"), folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    with closing(ScriptedServer(folder)) as one:
        yield one


TEXTS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
# A text, and its last tokens that are left out, so that it ends within a character or a mark.
SAMPLES = st.lists(st.tuples(TEXTS, st.integers(0, 3)), min_size=1, max_size=3)


def scored(token: int, number: int) -> decoding_pb2.TokenLogprobs:
    """Return log-probabilities that tell one token of a sample from the others."""
    return decoding_pb2.TokenLogprobs(logprob=-number, top_token_ids=[token, 70], top_logprobs=[-number, -number - 0.5])


def deltas_of(tokenizer: Tokenizer, texts: Sequence[tuple[str, int]], seed: int) -> list[gateway_pb2.Delta]:
    """Return what a gateway makes of these samples, with the stop string `stop`, if tokens come in random groups."""
    draw, groups = random.Random(seed), []
    for sample, (text, cut) in enumerate(texts):
        ids = tokenizer.encode_parts([text])[0]
        ids = ids[: max(0, len(ids) - cut)]
        own, at = [], 0
        output = SampleOutput(TextStream(tokenizer, decoding_pb2.Stopping(stop_strings=["stop"]), False), False)
        while not output.ended:
            more = ids[at : at + draw.randint(1, 3)]
            ends = at + len(more) == len(ids)
            end = engine_pb2.SampleEnd(reason=decoding_pb2.FINISH_REASON_STOP) if ends else None
            counted, piece = output.add(more, end)
            scores = [scored(token, at + number) for number, token in enumerate(counted)]
            at += len(more)
            if counted or piece:
                own.append(gateway_pb2.Delta(sample=sample, text=piece, token_ids=counted, logprobs=scores))
        groups.append(own)
    order = [number for number, own in enumerate(groups) for _ in own]
    draw.shuffle(order)
    return [groups[number].pop(0) for number in order]


class Joined:
    """The choices that the chunks of a stream make up, and its counts."""

    def __init__(self, path: str, chunks: Sequence[dict[str, Any]]) -> None:
        self.texts: dict[int, dict[str, str]] = {}
        self.scores: dict[int, dict[str, list[Any]]] = {}
        self.finish: dict[int, str] = {}
        self._path = path
        for chunk in chunks:
            for choice in chunk["choices"]:
                self._add(choice)

    def _add(self, choice: dict[str, Any]) -> None:
        index, texts = choice["index"], self.texts.setdefault(choice["index"], {})
        begin = len(texts.get("text", ""))
        for name, text in _texts(choice.get("delta") or {"text": choice.get("text")}):
            texts[name] = texts.get(name, "") + text
        for name in SCORES[self._path] if choice["logprobs"] else ():
            values = choice["logprobs"][name]
            self.scores.setdefault(index, {}).setdefault(name, []).extend(values)
            if name == "text_offset":
                assert all(begin <= offset <= len(texts.get("text", "")) for offset in values), (
                    "tokens come with their text"
                )
        if choice["finish_reason"]:
            self.finish[index] = choice["finish_reason"]


def _texts(delta: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("text", "content", "reasoning"):
        if delta.get(name):
            yield name, delta[name]
    for at, call in enumerate(delta.get("tool_calls") or ()):
        place = call.get("index", at)
        for name, text in call["function"].items():
            if text:
                yield f"call {place} {name}", text


@pytest.mark.parametrize(
    ("path", "fields"),
    [(COMPLETIONS, {}), (COMPLETIONS, {"prompt": ["x"] * 3}), (CHATS, {}), (CHATS, {"tools": TOOLS})],
    ids=["a completion", "of three prompts", "a chat", "with tools"],
)
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(samples=SAMPLES, seed=st.integers(0, 999), scores=st.booleans())
def test_a_stream_has_the_choices_scores_and_counts_of_the_answer(
    server: ScriptedServer,
    path: str,
    fields: dict[str, Any],
    samples: list[tuple[str, int]],
    seed: int,
    scores: bool,
) -> None:
    handler = server.handler
    handler.deltas = deltas_of(handler.own_tokenizer, samples, seed)
    body = {name: value for name, value in ASKED[path].items() if scores or "logprobs" not in name}
    body |= {"n": len(samples), "stop": "stop", **fields}
    prompts = len(fields.get("prompt", "x"))
    whole = server.client.post(path, json=body).json()
    *chunks, last = events(server.client.post(path, json={**body, **OPTIONS}))
    stream = Joined(path, chunks)
    for choice in whole["choices"]:
        index = choice["index"]
        assert stream.texts.get(index, {}) == dict(_texts(choice.get("message") or {"text": choice.get("text")}))
        assert stream.finish[index] == choice["finish_reason"]
        expected = choice["logprobs"] or {}
        for name in SCORES[path] if scores else ():
            assert stream.scores.get(index, {}).get(name, []) == expected[name], name
    assert stream.texts.keys() == {choice["index"] for choice in whole["choices"]}
    _check_counts([chunk["usage"] for chunk in chunks], last, whole["usage"])
    assert whole["usage"]["prompt_tokens"] == prompts * PROMPT_TOKENS
    assert whole["usage"]["completion_tokens"] == prompts * sum(len(delta.token_ids) for delta in handler.deltas)


def _check_counts(counts: list[dict[str, Any]], last: dict[str, Any], whole: dict[str, Any]) -> None:
    """Check that the counts never fall, that the last chunk has them alone, and that they are those of the answer."""
    assert (last["choices"], last["usage"]) == ([], whole)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        values = [count[name] for count in counts]
        assert values == sorted(values), name
        assert values[-1] == whole[name], name
    thoughts = [count.get("completion_tokens_details", {}).get("reasoning_tokens", 0) for count in counts]
    assert thoughts == sorted(thoughts)
    assert thoughts[-1] == whole.get("completion_tokens_details", {}).get("reasoning_tokens", 0)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_the_counts_come_in_the_last_chunk_alone_unless_all_are_asked_for(server: ScriptedServer, path: str) -> None:
    server.handler.deltas = deltas_of(server.handler.own_tokenizer, [("one", 0), ("two and", 0)], 1)
    body = {**ASKED[path], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(server.client.post(path, json=body))
    assert {json.dumps(chunk["usage"]) for chunk in chunks} == {"null"}
    assert last["usage"]["completion_tokens"] == sum(len(delta.token_ids) for delta in server.handler.deltas)
    without = events(server.client.post(path, json={**body, "stream_options": None}))
    assert not any("usage" in chunk for chunk in without)
