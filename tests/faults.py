"""Faults of single services while streams run; the streams continue unchanged.

A forwarder is between engine and KV manager. A fault is a function of the services and a source of random numbers: it
breaks something and returns when all services are connected again.
"""

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import grpc

from quire.v1 import gateway_pb2, gateway_pb2_grpc, kvmanager_pb2, kvmanager_pb2_grpc
from services.runtime import transport
from tests.load import SLOW_SEED, prompt_request
from tests.running.forwarder import Forwarder
from tests.running_quire import Answer, HealthWatch, RunningService
from tests.scrape import Scrape

LEASE_SECONDS = 2.0
WITHOUT_KEEPALIVE = [option for option in transport.channel_options() if "keepalive" not in option[0]]
_WAIT_SECONDS = 60
# More than HTTP/2's control frames, less than a Step of some sequences or the end of a stream with its reason.
_BYTES_OF_A_MESSAGE = 60
# Most of a report on a pool of 1024 blocks.
_BYTES_OF_A_REPORT = 1500

Fault = Callable[["Services", random.Random], None]
Away = Callable[["Services"], AbstractContextManager[None]]


class Streams:
    """Concurrent generations, each read by a thread."""

    def __init__(
        self,
        gateway: gateway_pb2_grpc.GatewayStub,
        requests: Sequence[gateway_pb2.GenerateRequest],
        seconds: float = _WAIT_SECONDS,
    ) -> None:
        """Start them. Each wait ends after `seconds`, and each generation after twice as long."""
        self._seconds = seconds
        self.answers = [Answer() for _ in requests]
        self._failures: dict[int, grpc.RpcError] = {}
        self._tokens = 0
        self._started = 0
        self._news = threading.Condition()
        self._calls = [gateway.Generate(request, timeout=2 * seconds) for request in requests]
        self._readers = [
            threading.Thread(target=self._read, args=(number,), daemon=True) for number in range(len(requests))
        ]
        for reader in self._readers:
            reader.start()

    def wait_for_starts(self) -> None:
        self._wait(lambda: self._started == len(self._calls))

    def wait_for_tokens(self, count: int) -> None:
        """Wait until all together have received this many tokens."""
        self._wait(lambda: self._tokens >= count)

    def cancel(self, number: int) -> None:
        self._calls[number].cancel()

    def running(self) -> int:
        return sum(reader.is_alive() for reader in self._readers)

    def tokens(self) -> list[list[int]]:
        """Wait for the end of all, and return their tokens. Raises the first failure."""
        self.wait_for_ends()
        for failure in self._failures.values():
            raise failure
        assert sum(answer.finished.usage.recomputed_tokens for answer in self.answers) == 0
        return [answer.token_ids for answer in self.answers]

    def codes(self) -> dict[int, grpc.StatusCode]:
        """Wait for the end of all, and return the status codes of failures by number."""
        return {number: failure.code() for number, failure in self.failures().items()}

    def failures(self) -> dict[int, grpc.RpcError]:
        """Wait for the end of all, and return the failures by number."""
        self.wait_for_ends()
        return self._failures

    def wait_for_ends(self) -> None:
        deadline = time.monotonic() + self._seconds
        for reader in self._readers:
            reader.join(deadline - time.monotonic())
            assert not reader.is_alive(), "a stream neither ends nor fails"

    def _read(self, number: int) -> None:
        try:
            for response in self._calls[number]:
                with self._news:
                    self.answers[number].add(response)
                    self._started += response.HasField("started")
                    self._tokens += len(response.delta.token_ids)
                    self._news.notify_all()
        except grpc.RpcError as error:
            with self._news:
                self._failures[number] = error
                self._news.notify_all()

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(lambda: done() or bool(self._failures), self._seconds)
        for failure in self._failures.values():
            raise failure


class Services:
    """The three services, with a forwarder between engine and KV manager; the pool has room for all streams."""

    def __init__(
        self,
        folder: Path,
        model: str,
        device_blocks: int = 1024,
        max_sequences: int = 32,
        keep: Callable[[RunningService], None] = lambda _: None,
    ) -> None:
        """Start them and wait until they are ready. `keep` receives each process that is started."""
        self._folder = folder
        self._keep = keep
        self._engine_options = (
            *("--model", model, "--device-blocks", str(device_blocks), "--max-sequences", str(max_sequences)),
            *("--dtype", "float32", "--device", "cpu", "--threads", "1"),
            *("--seconds-without-kvmanager", "60", "--heartbeat-seconds", "0.5"),
        )
        self.start_manager()
        self.forwarder = Forwarder(folder / "kvmanager.sock")
        self.engine, self._gateway = self.start_engine("first")
        self._gateway.output.wait_for("gateway is ready")

    @property
    def gateway(self) -> gateway_pb2_grpc.GatewayStub:
        return gateway_pb2_grpc.GatewayStub(self._gateway.channel)

    @property
    def kvmanager(self) -> kvmanager_pb2_grpc.KVManagerStub:
        return kvmanager_pb2_grpc.KVManagerStub(self.manager.channel)

    def start_manager(self) -> None:
        self.manager = self._start(
            "kvmanager", "--listen", f"unix:{self._folder}/kvmanager.sock", "--lease-seconds", str(LEASE_SECONDS)
        )

    def start_engine(self, name: str) -> tuple[RunningService, RunningService]:
        """Start an engine of this name and its gateway; the first reaches the manager through the forwarder."""
        engine = self._start(
            "engine",
            *("--listen", f"unix:{self._folder}/{name}.sock", "--engine-id", name),
            *("--kvmanager", self.forwarder.address if name == "first" else self.manager.address),
            *self._engine_options,
        )
        gateway = self._start(
            "gateway",
            *("--listen", f"unix:{self._folder}/{name}-gateway.sock", "--engines", engine.address),
            *("--link-timeout-seconds", "120"),
        )
        return engine, gateway

    def run(self, requests: Sequence[gateway_pb2.GenerateRequest]) -> Streams:
        return Streams(self.gateway, requests)

    def generate(self, request: gateway_pb2.GenerateRequest) -> Answer:
        return Answer.of(self.gateway.Generate(request, timeout=_WAIT_SECONDS))

    def pools(self) -> dict[str, kvmanager_pb2.PoolInfo]:
        pools = self.kvmanager.ListPools(kvmanager_pb2.ListPoolsRequest(), timeout=10, wait_for_ready=True).pools
        return {pool.engine_id: pool for pool in pools}

    def pool(self) -> kvmanager_pb2.PoolInfo:
        return self.pools()["first"]

    def sequences(self) -> dict[str, list[int]]:
        """Block tables by request id in the first engine's pool."""
        request = kvmanager_pb2.ListSequencesRequest(engine_id="first")
        answer = self.kvmanager.ListSequences(request, timeout=10)
        return {sequence.request_id: list(sequence.block_ids) for sequence in answer.sequences}

    def block_map(self) -> list[tuple[int, int]]:
        """State and count of each block of the first engine's pool."""
        request = kvmanager_pb2.GetBlockMapRequest(engine_id="first")
        answer = self.kvmanager.GetBlockMap(request, timeout=10)
        return list(zip(answer.states, answer.counts, strict=True))

    def engine_metric(self, name: str) -> float:
        return Scrape.of(self.engine.metrics_url).value(name)

    @contextmanager
    def reattaching(self) -> Iterator[None]:
        """Expect inside that the engine loses its manager, and at the end that it is attached again."""
        with self._engine_health() as expect:
            yield
            expect("NOT_SERVING")
            expect("SERVING")

    @contextmanager
    def manager_away(self) -> Iterator[None]:
        """Inside, the KV manager is dead and the engine has detected it; afterwards an empty one is attached."""
        with self._engine_health() as expect:
            self.manager.kill()
            expect("NOT_SERVING")
            yield
            self.manager.channel.close()
            self.start_manager()
            expect("SERVING")

    @contextmanager
    def connection_away(self) -> Iterator[None]:
        """Inside, the KV manager is unreachable and the engine has detected it; afterwards it is attached."""
        with self._engine_health() as expect:
            try:
                self.forwarder.refuse()
                self.forwarder.cut()
                expect("NOT_SERVING")
                yield
            finally:
                self.forwarder.accept()
            expect("SERVING")

    @contextmanager
    def _engine_health(self) -> Iterator[Callable[[str], None]]:
        """Yield a function that waits for the engine's next status; the first one is SERVING.

        The watch has no keepalive: that of a stopped engine's manager ends at the same time as its own would.
        """
        channel = grpc.insecure_channel(self.engine.address, options=WITHOUT_KEEPALIVE)
        watch = HealthWatch(channel, "quire.v1.Engine")

        def expect(status: str) -> None:
            assert watch.next(_WAIT_SECONDS) == status

        try:
            expect("SERVING")
            yield expect
        finally:
            watch.close()
            channel.close()

    def check_that_nothing_is_left(self) -> None:
        """Once all requests have ended, check that nothing is held and nothing was recomputed."""
        wait_until(lambda: self.pool().sequences == 0, "all sequences are freed")
        pool = self.pool()
        assert (pool.device.held, pool.device.withheld) == (0, 0)
        assert pool.device.free + pool.device.cached == pool.device_blocks
        assert self.engine_metric("quire_recomputed_tokens_total") == 0
        assert self.engine_metric("quire_num_preemptions_total") == 0
        assert all(count == 0 for _, count in self.block_map())

    def close(self) -> list[int]:
        """Stop all services; return the exit statuses of gateway, engine and manager."""
        statuses = [self._gateway.close(), self.engine.close(), self.manager.close()]
        self.forwarder.close()
        return statuses

    def _start(self, label: str, *arguments: str) -> RunningService:
        service = RunningService(label, *arguments)
        self._keep(service)
        return service


class Processes:
    """All services that were started; none outlives the test."""

    def __init__(self) -> None:
        self._all: list[RunningService] = []

    def keep(self, service: RunningService) -> None:
        self._all.append(service)

    def end(self) -> list[str]:
        running = [service for service in self._all if service.process.poll() is None]
        for service in running:
            service.kill()
        for service in self._all:
            service.channel.close()
            service.output.finish()
        return [service.label for service in running]


def wait_until(done: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Poll until `done` returns True, for states without an event."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def prompt(
    number: int, length: int, max_tokens: int, salt: str = "", *, slow: bool = False
) -> gateway_pb2.GenerateRequest:
    """Build a greedy request with a random prompt, always the same for a number."""
    draw = random.Random(number)
    request = prompt_request("", max_tokens, salt=salt)
    if slow:
        request.sampling.seed = SLOW_SEED
    request.prompt.token_ids.ids.extend(draw.randrange(3, 380) for _ in range(length))
    return request


def prompts(count: int, max_tokens: int, salt: str = "", *, slow: bool = False) -> list[gateway_pb2.GenerateRequest]:
    """Build requests with prompts of one to five blocks. Runs with different salts share no cached blocks."""
    return [prompt(number, 17 + 13 * number % 60, max_tokens, salt, slow=slow) for number in range(count)]


# Faults


def kill_the_manager(services: Services, _draw: random.Random) -> None:
    """Kill the KV manager, and start an empty one."""
    with services.manager_away():
        pass


def cut_the_connection(services: Services, draw: random.Random) -> None:
    with services.reattaching():
        services.forwarder.refuse()
        services.forwarder.cut()
        services.forwarder.wait_for_refusals(draw.randint(0, 2))
        services.forwarder.accept()


def cut_without_a_refusal(services: Services, _draw: random.Random) -> None:
    """Cut the connection, and accept the next."""
    with services.reattaching():
        services.forwarder.cut()


def deliver_late(services: Services, _draw: random.Random) -> None:
    """Deliver a Step of the old session to the manager after a new session has begun."""
    with services.reattaching():
        old = services.forwarder.hold()
        services.forwarder.wait_for_held_bytes(old, _BYTES_OF_A_MESSAGE)
        services.forwarder.leave_client(old)
    before = services.pool().session
    services.forwarder.wait_for_lost_answer(old, _BYTES_OF_A_MESSAGE)  # the manager has ended the old session
    services.forwarder.release(old)
    services.forwarder.end(old)
    assert services.pool().session == before


def attach_late(services: Services, _draw: random.Random) -> None:
    """Deliver an abandoned attempt to attach to the manager after a later one.

    The manager treats the late attempt as the newest, so the engine attaches again. An engine that pauses within its
    report looks like one at its end: the manager then gets a partial attempt, and another attempt follows.
    """
    assert any(_attached_again(services) for _ in range(5))


def _attached_again(services: Services) -> bool:
    """Return whether the attempt was complete, so that the engine attached again."""
    with services.reattaching():
        services.forwarder.hold_next()
        services.forwarder.cut()
        late = services.forwarder.held_next(_BYTES_OF_A_REPORT)
        services.forwarder.wait_for_silence(late)  # because the last page has no visible mark
        services.forwarder.leave_client(late)
    before = services.pool().session
    services.forwarder.release(late)
    try:
        wait_until(lambda: services.pool().session > before + 1, "the engine has attached again", 10)
    except AssertionError:
        return False
    finally:
        services.forwarder.end(late)
    return True


def stop_the_manager(services: Services, draw: random.Random, seconds: float | None = None) -> None:
    """Stop the KV manager's process for at most 3 seconds."""
    services.manager.process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(draw.uniform(0.1, 3) if seconds is None else seconds)
    finally:
        services.manager.process.send_signal(signal.SIGCONT)


def stop_the_engine(services: Services, _draw: random.Random) -> None:
    """Stop the engine's process until its pool is dropped."""
    before = services.pool()
    with services.reattaching():
        services.engine.process.send_signal(signal.SIGSTOP)
        try:
            services.forwarder.cut()
            wait_until(lambda: "first" not in services.pools(), "the pool is dropped", _WAIT_SECONDS)
        finally:
            services.engine.process.send_signal(signal.SIGCONT)
    after = services.pool()
    assert after.incarnation == before.incarnation
    assert after.session != before.session


def kill_another_engine(
    services: Services, _draw: random.Random, just_before: Callable[[Services], None] = lambda _: None
) -> None:
    """Start a second engine with streams, and kill it: its pool is dropped within the lease."""
    engine, gateway = services.start_engine("second")
    gateway.output.wait_for("gateway is ready")
    victims = Streams(gateway_pb2_grpc.GatewayStub(gateway.channel), prompts(4, 1500))
    victims.wait_for_tokens(20)
    wait_until(lambda: services.pools()["second"].sequences == 4, "all sequences run")
    just_before(services)
    engine.kill()
    wait_until(lambda: "second" not in services.pools(), "the pool is dropped", LEASE_SECONDS + 20)
    assert set(victims.codes().values()) == {grpc.StatusCode.UNAVAILABLE}
    assert gateway.close() == 0


def cancel_some(services: Services, streams: Streams, draw: random.Random) -> list[int]:
    """Cancel a quarter of the running streams without a manager; return their numbers."""
    count = len(streams.answers)
    cancelled = draw.sample(range(count), count // 4)
    for number in cancelled:
        streams.cancel(number)
    wait_until(
        lambda: services.engine_metric("quire_num_requests_running") <= count - len(cancelled),
        "the engine has received the cancellations",
    )
    return cancelled


def cut_while_requests_come_and_go(
    services: Services, requests: Sequence[gateway_pb2.GenerateRequest], cuts: int
) -> list[list[int]]:
    """Run short requests, 8 at a time, and cut the connection again and again; return their tokens.

    Answers are delayed, so that each cut loses some: those to Steps with frees of ended sequences.
    """
    services.forwarder.delay_answers(0.05)
    cut_without_a_refusal(services, random.Random())
    try:
        with ThreadPoolExecutor(8) as clients:
            answers = [clients.submit(services.generate, request) for request in requests]
            for cut in range(cuts):
                answers[(cut + 1) * len(requests) // (cuts + 1)].result(_WAIT_SECONDS)
                cut_without_a_refusal(services, random.Random())
            assert sum(answer.result(_WAIT_SECONDS).finished.usage.recomputed_tokens for answer in answers) == 0
            return [answer.result().token_ids for answer in answers]
    finally:
        services.forwarder.delay_answers(0)
        cut_without_a_refusal(services, random.Random())


def wait_for_sequences(services: Services, most: int) -> None:
    """Wait until at most `most` sequences hold blocks: frees follow the report by a Step."""
    wait_until(lambda: services.pool().sequences <= most, f"no more than {most} sequences hold blocks")
