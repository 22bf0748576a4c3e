"""The wheel of `make wheel` is enough: it serves a model from an empty environment without a compiler."""

import os
import re
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.native import prebuilt
from engine.native.cpu_class import CLASSES, supported
from tests.running_quire import Output

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
MINUTES = 60.0


@pytest.fixture(scope="module")
def wheel() -> Path:
    found = list((ROOT / "build" / "wheel").glob("quire-*.whl"))
    assert len(found) == 1, "run make wheel"
    return found[0]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a user who has nothing, and the folder in which commands run."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def environment(home: Path) -> dict[str, str]:
    """No settings of Quire, no paths of this repository, and no compiler."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("QUIRE_", "PYTHON", "XDG_"))}
    variables = {"PATH": str(home / "venv" / "bin"), "HOME": str(home), "XDG_RUNTIME_DIR": str(home)}
    # Ports of services that run on this machine may be in use.
    any_port = {f"QUIRE_SERVE_{name}": "127.0.0.1:0" for name in ("METRICS_LISTEN", "HTTP_LISTEN", "MAP_LISTEN")}
    return {**kept, **variables, **any_port, "XDG_CACHE_HOME": str(home / "cache")}


@pytest.fixture(scope="module")
def quire(wheel: Path, home: Path, environment: dict[str, str]) -> str:
    """The command `quire` of an environment with nothing but the wheel and what it requires."""
    subprocess.run([sys.executable, "-m", "venv", str(home / "venv")], check=True)
    pip = [str(home / "venv" / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    install = ["install", "-q", "--no-compile", "-c", str(ROOT / "constraints.txt"), str(wheel)]
    # Settings of pip, such as its index, can be in the user's home.
    subprocess.run([*pip, *install], cwd=home, env={**environment, "HOME": os.environ["HOME"]}, check=True)
    subprocess.run([*pip, "check"], cwd=home, env=environment, check=True)
    return str(home / "venv" / "bin" / "quire")


def run(quire: str, *arguments: str, home: Path, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    command = [quire, *arguments]
    return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False, timeout=600)


@pytest.fixture
def serving(quire: str, home: Path, environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], Output]]:
    command = [quire, "serve", "demo", "--listen", f"unix:{home}/gateway.sock"]
    process = subprocess.Popen(
        command, cwd=home, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process, Output(process)
    finally:
        if process.poll() is None:
            process.kill()


def test_the_wheel_contains_what_is_needed_and_names_the_systems_that_can_load_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    kernels = {f"engine/native/prebuilt/{prebuilt.library_of(one)}" for one in CLASSES}
    generated = ROOT / "protos" / "quire" / "v1"
    protos = {f"quire/v1/{path.name}" for kind in ("proto", "py", "pyi") for path in generated.glob(f"*.{kind}")}
    folders = ("gateway/http/chat_page/page", "kvmanager/pages/page", "runtime/pages/shared")
    pages = {f"services/{folder}/{path.name}" for folder in folders for path in (ROOT / "services" / folder).iterdir()}
    expected = {*kernels, *protos, *pages, "quire/v1/py.typed"}
    assert expected - names == set()
    assert {name.split("/")[0] for name in names} == {
        *("blocks", "engine", "kvmanager", "quire", "services", "start_quire.py"),
        f"quire-{VERSION}.dist-info",
    }
    assert {name for name in names if name.endswith(".so")} == kernels
    assert re.fullmatch(rf"quire-{VERSION}-py3-none-manylinux\S*_x86_64\.whl", wheel.name)


def test_the_command_prints_the_version(quire: str, home: Path, environment: dict[str, str]) -> None:
    assert run(quire, "--version", home=home, environment=environment).stdout == f"quire {VERSION}\n"


@pytest.mark.skipif(not supported(), reason="this CPU has no AVX2: it runs no kernels")
def test_a_model_is_served_and_answers_from_the_wheel_alone(
    serving: tuple[subprocess.Popen[str], Output], quire: str, home: Path, environment: dict[str, str]
) -> None:
    process, output = serving
    output.wait_for("ready: gateway at ", 600)
    services = psutil.Process(process.pid).children(recursive=True)
    assert len(services) >= 3
    answer = run(quire, "generate", "Paged memory is", "--max-tokens", "8", home=home, environment=environment)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()
    assert [line for line in output.lines if f"the CPU kernels of class {supported()[0].name} are ready" in line]
    assert list(home.rglob("cache/**/*.so")) == []  # none was compiled
    process.send_signal(signal.SIGINT)
    assert process.wait(MINUTES) == 0
    output.finish()
    # A process whose parent has ended is a zombie until the first process of the machine reads its status.
    assert [one for one in services if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
    assert list(home.rglob("*.sock")) == []
