"""Plays outputs of a model, and reads responses in both forms."""

import json
import random
from typing import Any

import httpx

from quire.v1 import gateway_pb2
from tests.services.gateway.http.scripted_server import ScriptedServer

Item = dict[str, Any]
SAID = {"role": "user", "content": "Hi"}


def call_of(name: str, **arguments: Any) -> str:
    """Write a call as the model does."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def without_ids(items: list[Item]) -> list[Item]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


class Player:
    """Posts bodies to a server, whose model writes what a test says."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server

    def play(self, text: str, seed: int = 1) -> None:
        """Let the model write a text, cut at random."""
        rng, parts = random.Random(seed), []
        while text:
            size = rng.randrange(1, 7)
            parts.append(text[:size])
            text = text[size:]
        tokenizer = self.server.handler.own_tokenizer
        self.server.handler.script = [(part, tokenizer.encode_parts([part])[0]) for part in parts]

    def post(self, path: str = "/v1/responses", **body: Any) -> httpx.Response:
        return self.server.client.post(path, json={"input": "Hi", "max_output_tokens": 8, **body})

    def respond(self, **body: Any) -> dict[str, Any]:
        answer = self.post(**body)
        assert answer.status_code == 200, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def stream(self, **body: Any) -> list[dict[str, Any]]:
        """Return the events of a stream, after a check of their numbers and names."""
        answer = self.post(**body, stream=True) if "stream" not in body else self.post(**body)
        assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
        found = []
        for number, block in enumerate(answer.text.removesuffix("\n\n").split("\n\n")):
            name, data = block.split("\n", 1)
            found.append(json.loads(data.removeprefix("data: ")))
            assert (name, number) == (f"event: {found[-1]['type']}", found[-1]["sequence_number"])
        return found

    def both(self, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the response and the events of a stream, after a check that both have the same items."""
        made, events = self.respond(**{**body, "stream": False}), self.stream(**{**body, "stream": True})
        assert without_ids(events[-1]["response"]["output"]) == without_ids(made["output"])
        return made, events

    @property
    def request(self) -> gateway_pb2.GenerateRequest:
        """The last request that the gateway has made of a body."""
        return self.server.handler.requests[-1]
