"""Permanent failures of services, and failover of their streams."""

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from quire.v1 import gateway_pb2_grpc
from services.runtime.logs.records import message_of
from tests.faults import Streams
from tests.load import prompt_request
from tests.running.engine_that_loses_its_device import LAST_STEP, MESSAGE
from tests.running.failover import failovers
from tests.running_quire import (
    CALL_SECONDS,
    HealthWatch,
    RunningService,
    start_quire,
)
from tests.services.faults.test_failures import assert_nothing_is_left


def test_serve_stops_when_a_service_has_used_up_its_restarts(tiny_model: Callable[[str], Path]) -> None:
    serving = start_quire("--model", str(tiny_model("llama")), "--device-blocks", "16", "--max-restarts", "2")
    try:
        for number in (1, 2):
            before = len(serving.lines)
            os.kill(serving.children()["kvmanager"], signal.SIGKILL)
            line = serving.output.wait_for("starting it again", after=before)
            assert line.startswith("serve     | ERROR kvmanager was ended by SIGKILL: starting it again ")
            assert line.endswith(f", restart {number} of at most 2")
            serving.output.wait_for("kvmanager is ready", after=before)
        services = serving.children()
        os.kill(services["kvmanager"], signal.SIGKILL)
        assert serving.ended() == 1
        assert serving.lines[-1] == "serve     | ERROR kvmanager was ended by SIGKILL (2 restarts before did not help)"
        assert_nothing_is_left(serving.lines, services)
    finally:
        serving.close()


NAMES = {"kvmanager": "quire.v1.KVManager", "engine": "quire.v1.Engine", "gateway": "quire.v1.Gateway"}


def test_an_engine_that_loses_its_device_ends_and_its_streams_fail_over(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    at = {name: f"unix:{tmp_path}/{name}.sock" for name in ("kvmanager", "losing", "other", "gateway")}
    options = ("--kvmanager", at["kvmanager"], "--model", str(tiny_model("llama")), "--device-blocks", "64")
    requests = [prompt_request(f"{number} blocks of keys and values", 2 * LAST_STEP) for number in range(4)]
    with ExitStack() as running:

        def start(label: str, name: str, *arguments: str, module: str = "") -> RunningService:
            arguments = ("--listen", at[name], *arguments)
            service = RunningService(label, *(label, *arguments) if module else arguments, module=module)
            running.enter_context(closing(service))
            watch = running.enter_context(closing(HealthWatch(service.channel, NAMES[label])))
            assert "SERVING" in iter(watch.next, "BROKEN")
            return service

        start("kvmanager", "kvmanager")
        losing = start("engine", "losing", *options, module="tests.running.engine_that_loses_its_device")
        engines = ("--engines", f"{at['losing']},{at['other']}", "--failover-seconds", str(CALL_SECONDS))
        gateway = start("gateway", "gateway", *engines)  # once ready, it has one engine to choose
        start("engine", "other", *options)
        stub = gateway_pb2_grpc.GatewayStub(gateway.channel)
        interrupted = Streams(stub, requests)
        assert interrupted.codes() == {}
        assert losing.process.wait(CALL_SECONDS) == 1
        undisturbed = Streams(stub, requests)
        assert undisturbed.codes() == {}
    assert message_of(losing.output.lines[-1]).startswith(f"engine failed: the device is lost: {MESSAGE}")
    assert interrupted.tokens() == undisturbed.tokens()
    assert failovers(interrupted.answers) >= 1
