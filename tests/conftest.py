"""Shared fixtures: the demo model, tiny models, and a running Quire."""

import os
import secrets
import signal
import sys
import threading

# As in the engine's process; before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
if "PYTEST_XDIST_WORKER" in os.environ:  # other workers use the other cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# A background process may ignore SIGINT, and its children inherit that; tests interrupt theirs.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup ignores SIGHUP, which some tests send to processes that they start.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Tests use torch's deterministic mode, which fills new memory; on a GPU it needs this setting.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

# Before triton is imported: without a GPU its kernels run under its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests import without_hypothesis

if find_spec("hypothesis") is None:
    without_hypothesis.install()
import hypothesis

from services.models.model_store import default_cache, resolve

# The time of an example depends on the machine more than on the code.
hypothesis.settings.register_profile("quire", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("quire")

if TYPE_CHECKING:  # tests of the core run without the packages of servers
    from tests.running_quire import RunningQuire

_SIMULATION_SEED = "QUIRE_SIMULATION_SEED"
os.environ.setdefault(_SIMULATION_SEED, str(secrets.randbits(40)))

# The rooms with the longest tests.
_FIRST = ("deployment", "services")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long tests first, so that the workers of pytest-xdist end at the same time."""
    here = Path(__file__).parent
    items.sort(key=lambda item: item.path.relative_to(here).parts[0] not in _FIRST)


def pytest_report_header() -> str:
    """Print the seed of the simulated scenarios, which every worker uses."""
    return f"seed of new simulated scenarios: {os.environ[_SIMULATION_SEED]}"


@pytest.fixture(autouse=True)
def _subnormals() -> None:
    """Keep subnormal numbers: loading the kernels makes the processor flush them to zero."""
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True)
def _compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to compile the CPU's kernels for one test alone, which takes a minute."""
    if loading := sys.modules.get("services.engine.startup.native_kernels"):
        refuse = partial(pytest.fail, "give the engine's settings the kernels_folder of tests.engine.native_kernels")
        monkeypatch.setattr(loading, "_build_temporary", lambda _: refuse())


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return resolve("demo", default_cache(), lambda *_: None)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a tiny random checkpoint with a tokenizer, one of those of tests/tiny_models.py."""
    from tests.tiny_models import make_tiny_model  # imports transformers

    folders: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in folders:
            folders[family] = make_tiny_model(family, tmp_path_factory.mktemp("models") / f"tiny-{family}")
        return folders[family]

    return make


@pytest.fixture
def quire() -> Iterator["Callable[..., RunningQuire]"]:
    """Starts `quire serve` with the given arguments, and stops it after the test."""
    from tests.running_quire import start_quire

    running: list[RunningQuire] = []

    def start(*arguments: str) -> "RunningQuire":
        running.append(start_quire(*arguments))
        return running[-1]

    yield start
    for one in running:
        one.close()
