"""Engines that fail while streams run, a gateway that fails the streams over, and checks of their answers.

A forwarder is between the gateway and each engine. A fault is a function of the services and a source of random
numbers: it breaks an engine or its link, and returns when that engine can be restarted.
"""

import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from quire.v1 import decoding_pb2, gateway_pb2, gateway_pb2_grpc, kvmanager_pb2, kvmanager_pb2_grpc
from tests.faults import Streams, prompt, wait_until
from tests.load import SLOW_SEED
from tests.running.forwarder import Forwarder
from tests.running_quire import Answer, RunningService

NAMES = ("one", "two")
TOLERANCE = 1e-3  # of log-probabilities
# Of silence, after which an engine counts as lost.
LINK_SECONDS = 5.0
_GRACE_SECONDS = 0.2
_STOP_TOKEN = 40  # a token that ends some of the streams
_SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "integer"}}, "required": ["name"]}'
)

Fault = Callable[["Failing", random.Random], None]


class Failing:
    """A KV manager, engines of one model, and a gateway before them, each a process."""

    def __init__(
        self,
        folder: Path,
        model: str,
        keep: Callable[[RunningService], None] = lambda _: None,
        engine_options: Sequence[str] = ("--device-blocks", "1024"),
    ) -> None:
        """Start them and wait until each engine is linked. `keep` receives each process that is started."""
        self._folder = folder
        self._engine_options = engine_options
        self._keep = keep
        self._model = model
        self.manager = self._start_manager()
        self.engines = {name: self._start_engine(name) for name in NAMES}
        self.forwarders = {name: Forwarder(folder / f"{name}.sock") for name in NAMES}
        self.gateway = self._start(
            "gateway",
            *("--listen", f"unix:{folder}/gateway.sock", "--routing", "round-robin"),
            *("--engines", ",".join(forwarder.address for forwarder in self.forwarders.values())),
            *("--link-timeout-seconds", str(LINK_SECONDS), "--failovers", "10", "--failover-seconds", "60"),
        )
        self._streams: Streams | None = None
        for name in NAMES:
            self._wait_for_link(name, after=0)

    def run(self, requests: Sequence[gateway_pb2.GenerateRequest], seconds: float = 60) -> Streams:
        """Begin streams that all end within `seconds`."""
        self._streams = Streams(gateway_pb2_grpc.GatewayStub(self.gateway.channel), requests, seconds)
        return self._streams

    def mend(self) -> None:
        """Restart dead engines, and wait until the gateway has all of its links."""
        for name, engine in self.engines.items():
            if engine.process.poll() is not None:
                engine.channel.close()
                after = len(self.gateway.output.lines)
                self.engines[name] = self._start_engine(name)
                self._wait_for_link(name, after)
        for name in NAMES:
            wait_until(lambda name=name: self._is_linked(name), f"engine {name} has its link")  # type: ignore[misc]

    def restart_manager(self) -> None:
        """Kill the KV manager, and start an empty one."""
        self.manager.kill()
        self.manager.channel.close()
        self.manager = self._start_manager()

    def restart_while_streams_run(self) -> int:
        """Restart engines that have ended, as a supervisor would, until no stream runs; return the count of ends."""
        deaths = 0
        while self.any_stream_runs():
            for name, engine in self.engines.items():
                if engine.process.poll() is not None:
                    deaths += 1
                    engine.channel.close()
                    self.engines[name] = self._start_engine(name)
            time.sleep(0.02)
        return deaths + sum(engine.process.poll() is not None for engine in self.engines.values())

    def any_stream_runs(self) -> bool:
        return self._streams is not None and self._streams.running() > 0

    def wait_for_loss(self, name: str, after: int) -> None:
        """Wait until a request fails over from an engine, in the gateway's output from line `after` on.

        Return also when all streams have ended.
        """

        def lost() -> bool:
            lines = self.gateway.output.lines[after:]
            return any(f"fails over from engine {name}" in line for line in lines) or not self.any_stream_runs()

        wait_until(lost, f"a request fails over from engine {name}")

    def check_that_nothing_is_left(self) -> None:
        """Once all streams have ended, no engine that runs holds a block for them."""
        kvmanager = kvmanager_pb2_grpc.KVManagerStub(self.manager.channel)

        def held() -> int:
            pools = kvmanager.ListPools(kvmanager_pb2.ListPoolsRequest(), timeout=10).pools
            return sum(pool.sequences for pool in pools)

        wait_until(lambda: held() == 0, "all sequences are freed")

    def close(self) -> list[int]:
        """Stop all services; return the exit statuses of gateway and manager."""
        gateway = self.gateway.close()
        for engine in self.engines.values():
            engine.close()
        for forwarder in self.forwarders.values():
            forwarder.close()
        return [gateway, self.manager.close()]

    def _is_linked(self, name: str) -> bool:
        address = self.forwarders[name].address
        lines = [line for line in self.gateway.output.lines if f"engine at {address}" in line]
        return bool(lines) and "serves" in lines[-1]

    def _wait_for_link(self, name: str, after: int) -> None:
        self.gateway.output.wait_for(f"engine at {self.forwarders[name].address} serves", after=after)

    def _start_manager(self) -> RunningService:
        return self._start("kvmanager", "--listen", f"unix:{self._folder}/kvmanager.sock", "--lease-seconds", "2")

    def _start_engine(self, name: str) -> RunningService:
        return self._start(
            "engine",
            *("--listen", f"unix:{self._folder}/{name}.sock", "--engine-id", name),
            *("--kvmanager", self.manager.address, "--model", self._model),
            *self._engine_options,
            *("--max-sequences", "80", "--device", "cpu", "--threads", "1"),
            *("--heartbeat-seconds", "0.2", "--grace-seconds", str(_GRACE_SECONDS)),
            module="tests.running.deadly_engine",
        )

    def _start(self, label: str, *arguments: str, module: str = "") -> RunningService:
        service = RunningService(label, *((label,) if module else ()), *arguments, module=module)
        self._keep(service)
        return service


# Faults


def kill(services: Failing, draw: random.Random) -> None:
    services.engines[draw.choice(NAMES)].kill()


def drain(services: Failing, draw: random.Random) -> None:
    """Terminate an engine whose grace is too short for its streams."""
    engine = services.engines[draw.choice(NAMES)]
    engine.process.terminate()
    assert engine.process.wait(timeout=30) == 0


def suspend(services: Failing, draw: random.Random) -> None:
    """Suspend an engine until its streams have failed over, and resume it."""
    name, after = draw.choice(NAMES), len(services.gateway.output.lines)
    services.engines[name].process.send_signal(signal.SIGSTOP)
    try:
        services.wait_for_loss(name, after)
    finally:
        services.engines[name].process.send_signal(signal.SIGCONT)


def cut(services: Failing, draw: random.Random) -> None:
    """Break the link between the gateway and an engine, and refuse some attempts to connect again."""
    name, after = draw.choice(NAMES), len(services.gateway.output.lines)
    forwarder = services.forwarders[name]
    forwarder.refuse()
    forwarder.cut()
    services.wait_for_loss(name, after)
    forwarder.wait_for_refusals(draw.randint(0, 1))
    forwarder.accept()


def suspend_and_kill(services: Failing, draw: random.Random) -> None:
    """Suspend an engine, resume it, and kill the other one: the first gets its earlier requests again."""
    name, other = draw.sample(NAMES, 2)
    after = len(services.gateway.output.lines)
    process = services.engines[name].process
    process.send_signal(signal.SIGSTOP)
    try:
        services.wait_for_loss(name, after)
    finally:
        process.send_signal(signal.SIGCONT)
    services.engines[other].kill()


# Faults that need a restart come last.
FAULTS: dict[str, Fault] = {
    "the link to an engine breaks": cut,
    "an engine is suspended and resumed": suspend,
    "an engine drains past its grace": drain,
    "an engine is killed": kill,
}
# Sequences of faults.
CHAINS: dict[str, Fault] = {"an engine is suspended, and the other one is killed": suspend_and_kill}


# Streams


def streams(count: int, max_tokens: int, salt: str) -> list[gateway_pb2.GenerateRequest]:
    """Make requests of all kinds, always the same for a number. Runs with different salts share no cached blocks."""
    return [_stream(number, max_tokens, salt) for number in range(count)]


def _stream(number: int, max_tokens: int, salt: str) -> gateway_pb2.GenerateRequest:
    draw = random.Random(number)
    request = prompt(number, 17 + 13 * number % 60, max_tokens, salt)
    if number % 8 == 7:
        request.beam_search.width = 3
        request.sampling.sample_count = 2
        return request
    if number % 2 == 0:
        request.sampling.seed = SLOW_SEED  # slow; a greedy request has no other use of it
    else:
        request.sampling.temperature, request.sampling.seed = 1.0, draw.getrandbits(40)
        request.sampling.top_p = draw.choice((1.0, 0.9))
        request.sampling.sample_count = draw.choice((1, 1, 2, 3))
    _add_rules(request, draw)
    if number % 8 == 6:
        request.logit_rules.bad_words.extend(["e", "th", "an", "qu"])
    if number % 8 in (2, 3):
        request.output.logprobs = 2
    if number % 8 == 3:
        request.output.prompt_logprobs = 1
    if number % 8 in (4, 5):
        request.stopping.ignore_eos = False
        request.stopping.min_tokens = 0
        _constrain(request, number)
    elif draw.random() < 0.3:
        request.stopping.stop_strings.append("th")
    return request


def _add_rules(request: gateway_pb2.GenerateRequest, draw: random.Random) -> None:
    if draw.random() < 0.5:
        request.logit_rules.repetition_penalty = 1.2
        request.logit_rules.frequency_penalty = 0.3
        request.logit_rules.presence_penalty = 0.2
    if draw.random() < 0.5:
        request.logit_rules.logit_bias[_STOP_TOKEN] = 2.0
        request.stopping.stop_token_ids.append(_STOP_TOKEN)
        request.stopping.min_tokens = draw.choice((0, 20))


def _constrain(request: gateway_pb2.GenerateRequest, number: int) -> None:
    if number % 16 > 8:
        request.constraint.json_schema = _SCHEMA
    else:
        request.constraint.regex = "([a-z]{3,9} ){4,40}[0-9]{2}"


class SampleOutput(NamedTuple):
    """Tokens, text, end and log-probabilities of one sample."""

    token_ids: list[int]
    text: str
    end: gateway_pb2.SampleFinish
    logprobs: list[decoding_pb2.TokenLogprobs]


def samples_of(answer: Answer) -> list[SampleOutput]:
    """Join a client's messages by sample."""
    assert answer.events[0] == "started"
    assert answer.events[-1] == "finished"
    kinds = [kind for kind in answer.events[1:-1] if kind != "delta"]
    assert answer.events[1 : 1 + len(kinds)] == kinds == ["prompt_logprobs"] * len(kinds)
    samples = []
    for index, end in enumerate(answer.finished.samples):
        deltas = [delta for delta in answer.deltas if delta.sample == index]
        token_ids = [token for delta in deltas for token in delta.token_ids]
        logprobs = [one for delta in deltas for one in delta.logprobs]
        samples.append(SampleOutput(token_ids, "".join(delta.text for delta in deltas), end, logprobs))
    return samples


def check_equal(answers: Sequence[Answer], undisturbed: Sequence[Answer]) -> None:
    for number, (answer, expected) in enumerate(zip(answers, undisturbed, strict=True)):
        for sample, other in zip(samples_of(answer), samples_of(expected), strict=True):
            assert sample.token_ids == other.token_ids, f"stream {number}"
            assert (sample.text, sample.end.reason) == (other.text, other.end.reason), f"stream {number}"
            assert sample.end.stop_string == other.end.stop_string
            assert sample.end.stop_token_id == other.end.stop_token_id
            assert sample.end.score == pytest.approx(other.end.score, abs=TOLERANCE)
            _check_logprobs(sample.logprobs, other.logprobs)
        _check_logprobs(answer.prompt_logprobs, expected.prompt_logprobs)
        assert answer.finished.usage.generated_tokens == expected.finished.usage.generated_tokens
        assert answer.started.prompt_tokens == expected.started.prompt_tokens


def _check_logprobs(
    actual: Sequence[decoding_pb2.TokenLogprobs], expected: Sequence[decoding_pb2.TokenLogprobs]
) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        assert list(one.top_logprobs) == pytest.approx(list(other.top_logprobs), abs=TOLERANCE)


def failovers(answers: Sequence[Answer]) -> int:
    return sum(answer.finished.timing.failovers > 0 for answer in answers)
