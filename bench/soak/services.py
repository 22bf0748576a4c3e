"""The services of a soak as processes: two gateways, two engines and a KV manager, which are killed and restarted."""

import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from bench.soak.samples import Incarnation
from tests.running_quire import COMMAND, RunningService
from tests.scrape import Scrape

ENGINES, GATEWAYS, MANAGER = ("engine-a", "engine-b"), ("gateway-a", "gateway-b"), "kvmanager"
# Few, so that blocks are evicted, copied to host memory, and requests preempted.
_DEVICE_BLOCKS, _HOST_BLOCKS = 160, 48
_GRACE_SECONDS = "5"
# Computes nothing, so that many more requests fit into the time.
NULL_ENGINE = "bench.loads.null_engine"
_NULL_OPTIONS = (
    "--context-tokens",
    "8192",
    "--vocabulary-size",
    "49152",
    "--microseconds-per-token",
    "20",
    "--model-name",
    "demo",
)


class SoakServices:
    """Starts all services in a folder of sockets. Names and addresses stay the same after a restart."""

    def __init__(self, folder: Path, model: str, modules: Mapping[str, str]) -> None:
        """`modules` are those of a service's command, by its label, in place of Quire's own."""
        self._folder = folder
        self._model = model
        self._modules = modules
        self._lock = threading.Lock()
        self._running: dict[str, RunningService] = {}
        self._starts: Counter[str] = Counter()
        self._http: dict[str, str] = {}
        self.kills = self.terminations = 0

    @property
    def grpc_addresses(self) -> list[str]:
        """Addresses of both gateways."""
        return [self._address(name) for name in GATEWAYS]

    @property
    def http_urls(self) -> list[str]:
        """URLs of both gateways."""
        return [f"http://{self._http[name]}" for name in GATEWAYS]

    def start(self) -> None:
        """Start all, and wait until they serve."""
        for name in (MANAGER, *ENGINES, *GATEWAYS):
            self._start(name)

    def incarnations(self) -> list[Incarnation]:
        """Return the processes that run."""
        with self._lock:
            return [
                Incarnation(name, self._starts[name], one.process.pid, one.metrics_url)
                for name, one in self._running.items()
            ]

    def kill(self, name: str) -> None:
        """Kill a service, and start it again."""
        self._taken(name).kill()
        self.kills += 1
        self._start(name)

    def terminate(self, name: str) -> None:
        """Stop a service within its grace, and start it again."""
        self._taken(name).close()
        self.terminations += 1
        self._start(name)

    def held_blocks(self) -> int:
        """Return the held blocks of all pools that no pin holds."""
        page = Scrape.of(self._running[MANAGER].metrics_url)
        held = [one.value for one in page.samples if one.name == "quire_kv_blocks" and one.labels["state"] == "held"]
        pinned = [one.value for one in page.samples if one.name == "quire_kv_pinned_blocks"]
        return int(sum(held) - sum(pinned))

    def open_streams(self) -> int:
        """Return the admitted requests of all gateways."""
        pages = [Scrape.of(self._running[name].metrics_url) for name in GATEWAYS]
        return int(sum(sum(page.values("quire_open_streams", "protocol").values()) for page in pages))

    def close(self) -> None:
        """Stop all, clients' services first."""
        for name in (*GATEWAYS, *ENGINES, MANAGER):
            if name in self._running:
                one = self._taken(name)
                with suppress(RuntimeError):
                    one.close()

    def _taken(self, name: str) -> RunningService:
        with self._lock:
            one = self._running.pop(name)
        one.channel.close()
        return one

    def _start(self, name: str) -> None:
        label = name.partition("-")[0]
        module = self._modules.get(label, COMMAND)
        command = [label] if module != NULL_ENGINE else []
        one = RunningService(label, *command, *self._options(name), module=module)
        if name in GATEWAYS:
            self._http[name] = one.output.wait_for("gateway listens for HTTP at ").split("http://")[1]
            one.output.wait_for("gateway is ready")
        with self._lock:
            self._starts[name] += 1
            self._running[name] = one

    def _options(self, name: str) -> list[str]:
        options = ["--listen", self._address(name), "--grace-seconds", _GRACE_SECONDS]
        if name == MANAGER:
            return [*options, "--lease-seconds", "5"]
        options += ["--kvmanager", self._address(MANAGER)]
        if name in ENGINES:
            own = ["--engine-id", name, "--model", self._model, "--max-sequences", "24"]
            own += ["--device-blocks", str(_DEVICE_BLOCKS), "--host-blocks", str(_HOST_BLOCKS)]
            null = self._modules.get("engine") == NULL_ENGINE
            kind = _NULL_OPTIONS if null else ("--dtype", "auto", "--device", "cpu", "--threads", "1")
            return [*options, *own, *kind]
        # At a separate address, so that no other process uses the port of a stopped gateway.
        own = ["--engines", ",".join(map(self._address, ENGINES)), "--http-listen", self._http.get(name, "127.0.0.2:0")]
        return [*options, *own]

    def _address(self, name: str) -> str:
        return f"unix:{self._folder}/{name}.sock"
