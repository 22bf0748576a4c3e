"""The servers run without packages for health, command line, display and cache."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.load import prompt_request
from tests.running_quire import RunningQuire

NOT_NEEDED = ("grpc_health", "grpc_reflection", "click", "rich", "prometheus_client", "platformdirs")
NOT_NEEDED += ("fastapi", "starlette", "uvicorn", "httptools", "pythonjsonlogger", "opentelemetry")

PROGRAM = """
import asyncio, json, sys

class Absent:
    '''A finder without some packages.'''

    def __init__(self, finder, names):
        self.finder, self.names = finder, names

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.names else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

model, folder, *absent = sys.argv[1:]
sys.meta_path[:] = [Absent(finder, absent) for finder in sys.meta_path]

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from services.runtime import transport
from services.engine.server import EngineService
from services.engine.settings import EngineSettings
from services.gateway.server import GatewayService
from services.gateway.settings import GatewaySettings
from services.kvmanager.server import KVManagerService
from services.kvmanager.settings import KVManagerSettings

async def main():
    manager, engine, gateway = (f"unix:{folder}/{name}.sock" for name in ("kvmanager", "engine", "gateway"))
    services = [
        KVManagerService(KVManagerSettings(listen=manager, map_listen="", grace_seconds=0)),
        EngineService(
            EngineSettings(
                listen=engine, kvmanager=manager, model=model, attention_backend="torch", device_blocks=16
            )
        ),
        GatewayService(GatewaySettings(listen=gateway, engines=engine, http_listen="")),
    ]
    async with asyncio.TaskGroup() as tasks:
        running = []
        for service in services:
            await service.start()
            running.append(tasks.create_task(service.run()))
            await service.readiness.wait()
        await generate(gateway)
        for service in reversed(services):
            await service.drain()
        for task in running:
            task.cancel()
    for service in reversed(services):
        await service.stop()

async def generate(address):
    request = gateway_pb2.GenerateRequest.FromString(sys.stdin.buffer.read())
    async with transport.channel(address) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).Generate(request, timeout=60)
        ids = [token async for response in call for token in response.delta.token_ids]
    loaded = sorted({name.partition(".")[0] for name in sys.modules} & set(absent))
    print(json.dumps({"token_ids": ids, "loaded": loaded}))

asyncio.run(main())
"""


def test_three_bare_servers_in_one_event_loop_serve_a_request(
    tiny_quire: RunningQuire, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    request = prompt_request("The quick brown fox", 10)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_model("llama")), str(tmp_path), *NOT_NEEDED],
        input=request.SerializeToString(),
        capture_output=True,
        check=False,
        cwd=Path(__file__).parent.parent.parent,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert json.loads(done.stdout) == {"token_ids": tiny_quire.generate(request).token_ids, "loaded": []}


def test_packages_blocked_for_bare_servers_cannot_be_imported() -> None:
    beginning = PROGRAM[: PROGRAM.index("from quire.v1")]
    imports = """
import importlib
for name in absent:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(error)
"""
    arguments = [sys.executable, "-c", beginning + imports, "", "", *NOT_NEEDED]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"No module named '{name}'" for name in NOT_NEEDED]
