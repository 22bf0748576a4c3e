"""Every alert fires for its cause on running services, in a real Prometheus with the rules.

`make alerts-check` runs this, which takes some minutes, and writes docs/alerts-fired.md. All durations of the rules
are divided by 60: a minute becomes a second. Thresholds do not change.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import zmq
from smg_grpc_proto import vllm_engine_pb2_grpc as smg_grpc
from smg_grpc_proto.generated import common_pb2 as smg_pb2

from quire.v1 import kvmanager_pb2 as pb
from services.engine.kept.memory_file import MemoryFile
from tests.certificates import Authority
from tests.deployment.alert_stack import MAX_REQUESTS, AlertStack, clients, read, repeated, small_window, unread
from tests.deployment.alerts_report import DIVISOR, write_alerts
from tests.deployment.prometheus import ALERTS, RunningPrometheus
from tests.deployment.scaled_rules import scaled
from tests.deployment.test_alerts import alerts as all_alerts
from tests.engine.kept.test_kept_memory import IDENTITY
from tests.faulty_memory import FaultyMemory
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, RunningService
from tests.services.kvmanager.attach_stream import Stream

INTERVAL = "500ms"
MAX_SECONDS = 100
_SMG_PAUSE = 0.05  # seconds between two messages that are read

pytestmark = pytest.mark.timeout(1200)


class Fired(NamedTuple):
    """A firing alert, with its description and the seconds since its provocation."""

    provocation: str
    seconds: float
    description: str


class Watch:
    """A Prometheus, and the alerts that fired in it."""

    def __init__(self, prometheus: RunningPrometheus, fired: dict[str, Fired]) -> None:
        self._prometheus = prometheus
        self._fired = fired

    def see(self, provocation: str, names: tuple[str, ...], *acts: AbstractContextManager[None]) -> None:
        """Wait until alerts that were not firing fire during `acts`, which `provocation` describes."""
        self._until(lambda: not self._firing().keys() & {*names}, f"{names} do not stop firing")
        begun = time.monotonic()
        with ExitStack() as lasting:
            for act in acts:
                lasting.enter_context(act)
            self.wait_for(provocation, names, begun)

    def wait_for(self, provocation: str, names: tuple[str, ...], begun: float) -> None:
        """Wait until all of these have fired since `begun`, and record them."""
        self._until(lambda: self._note(provocation, begun, names), f"{names} do not all fire")

    @contextmanager
    def once(self, expression: str) -> Iterator[None]:
        """Wait until a query returns data."""
        self._prometheus.wait_until(expression)
        yield

    def _note(self, provocation: str, begun: float, names: tuple[str, ...]) -> bool:
        firing = self._firing()
        for name in (firing.keys() & {*names}) - self._fired.keys():
            self._fired[name] = Fired(provocation, time.monotonic() - begun, firing[name])
        return {*names} <= self._fired.keys()

    def _firing(self) -> dict[str, str]:
        """Descriptions of the firing alerts, by name."""
        alerts = [one for one in self._prometheus.alerts() if one["state"] == "firing"]
        return {one["labels"]["alertname"]: one["annotations"]["description"] for one in alerts}

    def _until(self, done: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + MAX_SECONDS
        while not done():
            assert time.monotonic() < deadline, f"{otherwise}; firing: {sorted(self._firing())}"
            time.sleep(0.25)  # Prometheus has no notifications to wait for


@pytest.fixture(scope="module")
def fired() -> dict[str, Fired]:
    return {}


@pytest.fixture(scope="module")
def kept_blocks() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder) / "kept"


@pytest.fixture(scope="module")
def stack(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, kept_blocks: Path
) -> Iterator[AlertStack]:
    one = AlertStack(tmp_path_factory.mktemp("stack"), str(tiny_model("llama")), kept_blocks)
    yield one
    one.close()


@pytest.fixture(scope="module")
def kept_by_another() -> Iterator[Path]:
    """A kept memory of another layout."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        memory = MemoryFile(Path(folder) / "kept")
        memory.make(IDENTITY)
        memory.close()
        yield memory.path


@pytest.fixture(scope="module")
def misconfigured(
    commands: Path,
    fired: dict[str, Fired],
    tiny_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    kept_by_another: Path,
) -> Iterator[Callable[[], None]]:
    """Waits for the alerts of a KV manager with a certificate of one day and a Prometheus without a gateway.

    And of an engine that cannot record its steps and finds blocks of another layout, and of a gateway without engines.
    """
    folder = tmp_path_factory.mktemp("misconfigured")
    certificate, key = Authority(folder).issue("kvmanager", days=1)
    manager = RunningService(
        *("kvmanager", "--listen", "127.0.0.1:0"),
        *("--tls-certificate", str(certificate), "--tls-key", str(key)),
    )
    address = manager.metrics_url.split("/")[2]
    options = ("--model", str(tiny_model("llama")), "--kvmanager", f"unix:{folder}/none.sock", "--device-blocks", "8")
    options += ("--keep-blocks", str(kept_by_another))
    unrecorded = "tests.running.unrecorded_engine"
    engine = RunningService("engine", "engine", *options, "--listen", "127.0.0.1:0", module=unrecorded)
    targets = {"kvmanager": address, "engine": engine.metrics_url.split("/")[2], "gateway": ""}
    prometheus = _prometheus(commands, folder, targets)
    gateway = RunningService(
        *("gateway", "--engines", f"unix:{folder}/no-engine.sock", "--listen", "127.0.0.1:0", "--http-listen", "")
    )
    alone = {"kvmanager": address, "engine": "", "gateway": gateway.metrics_url.split("/")[2]}
    without_engine = _prometheus(commands, tmp_path_factory.mktemp("without-engine"), alone)
    begun = time.monotonic()

    def see() -> None:
        Watch(without_engine, fired).wait_for("a gateway that no engine ever joins", ("QuireNoEngineYet",), begun)
        provocations = {
            "an engine whose recorder has no memory": ("QuireStepsNotRecorded",),
            "an engine that finds blocks of another layout": ("QuireKeptBlocksRefused",),
            "Prometheus has no gateway in its configuration": ("QuireTargetMissing",),
            "a KV manager whose certificate has a day left": ("QuireCertificateExpiresSoon", "QuireCertificateExpires"),
        }
        watch = Watch(prometheus, fired)
        for provocation, names in provocations.items():
            for name in names:
                watch.wait_for(provocation, (name,), begun)

    with ThreadPoolExecutor(1) as background:
        seen = background.submit(see)
        yield seen.result
    prometheus.close()
    without_engine.close()
    for service in (gateway, engine, manager):
        service.close()


@pytest.fixture(scope="module")
def watch(
    commands: Path,
    stack: AlertStack,
    misconfigured: Callable[[], None],
    fired: dict[str, Fired],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Watch]:
    prometheus = _prometheus(commands, tmp_path_factory.mktemp("prometheus"), stack.targets)
    prometheus.wait_until("count(up == 1) == 3")
    with clients(stack, 1, 4):  # some traffic before the first provocation
        prometheus.wait_until("quire:errors:ratio_rate5m == 0")
    yield Watch(prometheus, fired)
    prometheus.close()


@pytest.fixture(autouse=True)
def no_service_exits(stack: AlertStack) -> Iterator[None]:
    yield
    assert stack.exited() == {}


def test_alerts_of_a_slow_engine(watch: Watch, stack: AlertStack) -> None:
    watch.see(
        "the engine's process is stopped for 0.4 s and runs for 10 ms, repeatedly",
        ("QuireTokensBurnFast", "QuireTokensBurnSlowly"),
        clients(stack, 4, 40),
        stack.slowed("engine", 0.4, 0.01),
    )
    watch.see(
        "the engine's process is stopped for 3 s and runs for 0.1 s, repeatedly; some clients disconnect",
        ("QuireFirstTokenBurnFast", "QuireFirstTokenBurnSlowly", "QuireCancelToFreeSlow"),
        clients(stack, 8, 20),
        repeated(lambda ended: _disconnect(stack, ended), 4),
        stack.slowed("engine", 3.0, 0.1),
    )


def test_alerts_of_missing_services(watch: Watch, stack: AlertStack) -> None:
    watch.see(
        "the only engine is killed under load, over gRPC and HTTP",
        (
            *("QuireNoEngine", "QuireServiceDown", "QuirePoolDisconnected", "QuirePoolLost"),
            *("QuireErrorsBurnFast", "QuireErrorsBurnSlowly", "QuireHTTPErrors"),
        ),
        clients(stack, MAX_REQUESTS, 600, pause=0.1),
        watch.once("quire_num_requests_running >= 2"),
        repeated(lambda ended: _post(stack, ended)),
        _killed(stack, "engine"),
    )
    watch.see("the only gateway is killed", ("QuireNoGateway",), _killed(stack, "gateway"))
    watch.see(
        "the gateway is killed and started repeatedly",
        ("QuireServiceRestarting",),
        repeated(lambda _: _restart(stack, "gateway")),
    )


def test_alerts_of_overload(watch: Watch, stack: AlertStack) -> None:
    watch.see(
        f"{2 * MAX_REQUESTS} clients request 150 tokens each from a pool with room for four of them",
        ("QuirePoolFull", "QuirePreemptionStorm", "QuireRefusesRequests"),
        clients(stack, 2 * MAX_REQUESTS, 150, pause=0.1),
    )
    watch.see(
        "20 clients request 400 tokens each, and two others with a deadline of 0.2 s",
        ("QuireDeadlinesInQueue",),
        clients(stack, 20, 400),
        clients(stack, 2, 400, timeout=0.2),
    )


def test_alerts_of_slow_clients_and_tenants_at_their_limits(watch: Watch, stack: AlertStack) -> None:
    watch.see(
        "a tenant limited to one request at a time sends two, repeatedly",
        ("QuireTenantAtItsLimit",),
        repeated(lambda ended: _request_as_zeta(stack, ended), 2),
    )
    watch.see(
        "one client after another does not read its stream",
        ("QuireSlowClients",),
        repeated(lambda ended: _leave_unread(stack, ended), 2),
        clients(stack, 1, 50, pause=0.5),
    )


def test_alerts_of_a_slow_stopped_or_restarted_kv_manager(watch: Watch, stack: AlertStack) -> None:
    watch.see(
        "the KV manager's process is stopped for 40 ms and runs for 3 ms, repeatedly",
        ("QuireSequencesLeftOut", "QuireKVStepSlow"),
        clients(stack, 6, 60),
        stack.slowed("kvmanager", 0.04, 0.003),
    )
    watch.see(
        "the KV manager's process is stopped while requests run",
        ("QuireEngineStalled",),
        clients(stack, 4, 60),
        stack.stopped("kvmanager"),
    )
    watch.see("the KV manager is killed", ("QuireNoKVManager",), _killed(stack, "kvmanager"))
    watch.see("it is started again", ("QuireKVManagerRestarted",), clients(stack, 1, 4))


def test_alerts_of_audit_violations(watch: Watch, stack: AlertStack) -> None:
    watch.see(
        "another engine's stream frees sequences that do not exist",
        ("QuireUnexpectedRefusals",),
        repeated(lambda ended: _disagree(stack, ended)),
    )
    watch.see(
        "a cached block gets a holder that does not exist",
        ("QuireAuditViolation", "QuireBlocksWithheld"),
        _damaged(stack),
    )


def test_alerts_of_broken_links(watch: Watch, stack: AlertStack) -> None:
    watch.see(
        "the link between engine and KV manager is cut every second",
        ("QuireStreamsBreak",),
        clients(stack, 1, 20),
        repeated(lambda ended: _cut(stack.to_manager.cut, ended)),
    )
    watch.see(
        "the link between gateway and engine is cut every second while requests run",
        ("QuireFailoverStorm",),
        clients(stack, 8, 300),
        repeated(lambda ended: _cut(stack.to_engine.cut, ended)),
    )


def test_alerts_of_routers_that_do_not_follow_the_events(watch: Watch, stack: AlertStack) -> None:
    watch.see(
        "a subscriber of KV events does not read, and another one's requests for replays are none",
        ("QuireKVEventsMissed", "QuireKVEventReplaysFail"),
        clients(stack, 6, 60),
        _unread_events(stack),
        repeated(lambda ended: _ask_wrongly(stack, ended)),
    )
    watch.see(
        "smg reads at most 20 messages with KV events a second, a fifth of what comes",
        ("QuireSmgFallsBehind",),
        clients(stack, 6, 60),
        repeated(lambda ended: _follow_slowly_as_smg(stack, ended)),
    )


def test_alerts_of_flipped_bits(watch: Watch, stack: AlertStack, kept_blocks: Path) -> None:
    """The last one: wrong blocks stay withheld in the memory."""
    memory = FaultyMemory(kept_blocks)
    _ask_again(stack)
    memory.flip_blocks()
    watch.see(
        "a bit of each cached block flips, and a prompt hits them", ("QuireBlockContentsWrong",), _asked_again(stack)
    )
    memory.flip_seals()
    watch.see("a bit of each seal flips, and the engine is killed", ("QuireKeptSealsBroken",), _killed_once(stack))


def test_every_alert_has_fired_and_is_in_the_report(misconfigured: Callable[[], None], fired: dict[str, Fired]) -> None:
    misconfigured()
    assert fired.keys() == all_alerts().keys()
    write_alerts(
        [
            f"| {name} | {rule['labels']['severity']} | {fired[name].provocation} | {fired[name].seconds:.0f} s | "
            f"{fired[name].description} |"
            for name, rule in all_alerts().items()
        ]
    )


def _prometheus(commands: Path, folder: Path, targets: dict[str, str]) -> RunningPrometheus:
    rules = {ALERTS.name: scaled(ALERTS.read_text(), DIVISOR)}
    return RunningPrometheus(commands, folder, targets, rules, INTERVAL)


@contextmanager
def _killed(stack: AlertStack, name: str) -> Iterator[None]:
    stack.kill(name)
    try:
        yield
    finally:
        stack.start(name)


def _restart(stack: AlertStack, name: str) -> None:
    with _killed(stack, name):
        pass


@contextmanager
def _killed_once(stack: AlertStack) -> Iterator[None]:
    _restart(stack, "engine")
    yield


def _ask_again(stack: AlertStack) -> None:
    """Request the same as before."""
    call = stack.acme.gateway.Generate(prompt_request("the same words as ever, " * 4, 20), timeout=CALL_SECONDS)
    read(call, threading.Event())


@contextmanager
def _asked_again(stack: AlertStack) -> Iterator[None]:
    _ask_again(stack)
    yield


def _request_as_zeta(stack: AlertStack, ended: threading.Event) -> None:
    read(stack.zeta.gateway.Generate(prompt_request("two at a time", 300), timeout=CALL_SECONDS), ended)
    ended.wait(0.1)


def _disconnect(stack: AlertStack, ended: threading.Event) -> None:
    call = stack.acme.gateway.Generate(prompt_request("disconnected after a second", 600), timeout=CALL_SECONDS)
    ended.wait(1)
    call.cancel()


def _leave_unread(stack: AlertStack, ended: threading.Event) -> None:
    with unread(stack):
        ended.wait(2.5)  # the gateway allows a second, and checks once a second


def _disagree(stack: AlertStack, ended: threading.Event) -> None:
    other = Stream(stack.kvmanager).attach(engine_id="two")
    while not ended.wait(1):
        other.apply(frees=[pb.Free(sequence=7, reason=pb.FREE_REASON_FINISHED)])
    other.half_close()


@contextmanager
def _damaged(stack: AlertStack) -> Iterator[None]:
    stack.damage()
    yield


@contextmanager
def _unread_events(stack: AlertStack) -> Iterator[None]:
    """Subscribe with small buffers, and do not read."""
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.linger, subscriber.rcvhwm, subscriber.rcvbuf = 0, 1, 4096
        subscriber.subscribe(b"")
        subscriber.connect(f"tcp://{stack.kv_events}")
        yield


def _ask_wrongly(stack: AlertStack, ended: threading.Event) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(f"tcp://{stack.kv_event_replays}")
        while not ended.wait(0.5):
            client.send_multipart([b"", b"no number"])


def _follow_slowly_as_smg(stack: AlertStack, ended: threading.Event) -> None:
    request = smg_pb2.SubscribeKvEventsRequest()
    with small_window(stack.engine_address) as channel, suppress(grpc.RpcError):
        for _ in smg_grpc.VllmEngineStub(channel).SubscribeKvEvents(request, timeout=CALL_SECONDS):
            if ended.wait(_SMG_PAUSE):
                break


def _cut(cut: Callable[[], Any], ended: threading.Event) -> None:
    cut()
    ended.wait(1)


def _post(stack: AlertStack, ended: threading.Event) -> None:
    stack.post()
    ended.wait(0.2)
