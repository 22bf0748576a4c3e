"""Consumers of KV events as processes: ours, vLLM's own structs, and Dynamo's indexer. Each shows the blocks it knows.

vLLM's runs with the interpreter that QUIRE_VLLM_PYTHON names.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from bench.loads.http_server import free_address
from tests.acceptance.router_environments import ROUTERS, router_environment
from tests.running_quire import Output, Running

VLLM_PYTHON = "QUIRE_VLLM_PYTHON"
TIERS = {"device": "GPU", "host_pinned": "CPU", "disk": "STORAGE"}
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_SECONDS = 60
needs_vllm = pytest.mark.skipif(not os.environ.get(VLLM_PYTHON), reason=f"{VLLM_PYTHON} is not set")
_POLL_SECONDS = 0.05
MODEL = "m"


class Held(NamedTuple):
    """A block's hash in a tier; `group` is the number of its kind."""

    hash: int
    medium: str
    group: int = 0


def until(matches: Callable[[], bool], what: str, seconds: float = _SECONDS) -> None:
    """Wait until `matches`, and fail with `what` if it never does."""
    deadline = time.monotonic() + seconds
    while not matches():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(_POLL_SECONDS)


def plain(line: str) -> str:
    """Return a line of a log without colors."""
    return _COLORS.sub("", line)


class Consumer(Running, ABC):
    """A process that follows the events of an engine."""

    def __init__(self, command: Sequence[str | Path], **environment: str) -> None:
        self.process = subprocess.Popen(
            [str(one) for one in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROUTERS.parents[2],
            env={**os.environ, **environment},
        )
        self.output = Output(self.process)

    @abstractmethod
    def held(self) -> set[Held]:
        """Return the blocks that the consumer believes in."""

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill it: a consumer has nothing to finish."""
        assert self.process.stdin is not None
        self.process.kill()
        self.process.stdin.close()
        self.ended()


class AskedConsumer(Consumer):
    """A consumer that answers lines."""

    def __init__(self, command: Sequence[str | Path], **environment: str) -> None:
        super().__init__(command, **environment)
        self.output.wait_for('"ready"')

    def state(self) -> dict[str, Any]:
        """Return the position, counts and blocks."""
        assert self.process.stdin is not None
        before = len(self.output.lines)
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        state: dict[str, Any] = json.loads(self.output.wait_for('"last"', after=before))
        return state

    def held(self) -> set[Held]:
        return {Held(*one) for one in self.state()["blocks"]}


class VllmIndex(AskedConsumer):
    """vLLM's structs and the algorithm of its example. See routers/vllm_index.py."""

    def __init__(self, pub: str, replay: str) -> None:
        python = os.environ[VLLM_PYTHON]
        super().__init__([python, ROUTERS / "vllm_index.py", pub, replay], VLLM_LOGGING_LEVEL="ERROR")


class OwnIndex(AskedConsumer):
    """Our listener. See own_index.py."""

    def __init__(self, pub: str, replay: str) -> None:
        addresses = [one.removeprefix("tcp://") for one in (pub, replay)]
        super().__init__([sys.executable, "-m", "tests.acceptance.own_index", *addresses])


class DynamoIndex(Consumer):
    """Dynamo's standalone indexer, which listens on all interfaces: it has no option for another address."""

    def __init__(self, pub: str, replay: str, block_size: int = 4) -> None:
        address = free_address()
        self._url = f"http://{address}"
        python, port = router_environment("dynamo").python(), address.rpartition(":")[2]
        super().__init__([python, "-m", "dynamo.indexer", "--port", port, "--threads", "1"], DYN_LOG="debug")
        self.output.wait_for("HTTP server listening")
        engine = {"instance_id": 1, "endpoint": pub, "replay_endpoint": replay, "block_size": block_size}
        httpx.post(f"{self._url}/register", json={**engine, "model_name": MODEL}).raise_for_status()
        self.output.wait_for("Replay socket connected")

    def held(self) -> set[Held]:
        return {
            Held(block["block_hash"], TIERS[one["storage_tier"]])
            for one in self._dumped()
            for block in one["event"]["data"]["stored"]["blocks"]
        }

    def matched(self, token_ids: Sequence[int], **more: Any) -> dict[str, int]:
        """Return how many leading tokens of a prompt are in which tier or above, as Dynamo's router scores them."""
        body = {"token_ids": token_ids, "model_name": MODEL, **more}
        found = httpx.post(f"{self._url}/query", json=body).raise_for_status().json()
        scores: dict[str, int] = found["instances"].get("1", {})
        return {tier: scores.get(tier, 0) for tier in ("gpu", "cpu")}

    def warnings(self) -> list[str]:
        """Return what it complained about."""
        return [plain(line) for line in self.output.lines if "WARN" in line or "ERROR" in line]

    def _dumped(self) -> list[dict[str, Any]]:
        dump = httpx.get(f"{self._url}/dump").raise_for_status().json()
        return [event for index in dump.values() for event in index["events"]]
