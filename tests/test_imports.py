"""The contracts of import-linter in pyproject.toml are kept, and forbid at least the imports listed here."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NETWORK = ("grpc", "google.protobuf", "asyncio", "socket", "threading", "os", "time", "random", "quire.v1.gateway_pb2")
SERVICES = {init.parent.name for init in (ROOT / "services").glob("*/__init__.py")}

FORBIDDEN = {
    "blocks": ("engine", "kvmanager", "services", "torch", *NETWORK),
    "kvmanager": ("engine", "services", "torch", *NETWORK),
    "engine": ("kvmanager", "services", *NETWORK),
    "services.kvmanager": ("services.engine", "services.gateway"),
    "services.engine": ("services.kvmanager", "services.gateway"),
    "services.gateway": ("services.kvmanager", "services.engine"),
    # Every other service, including later ones.
    "services.loadgen": (
        *(f"services.{name}" for name in sorted(SERVICES - {"loadgen", "runtime"})),
        *("blocks", "engine", "kvmanager", "torch", "transformers"),
    ),
    # A lower room must not import a higher one.
    "services.runtime": ("services.wire", "services.models"),
    "services.wire": ("services.engine", "services.gateway", "services.kvmanager"),
    "engine.schedule": ("engine.attention", "engine.run"),
    "engine.attention": ("engine.native", "engine.model"),
    "kvmanager.verbs": ("kvmanager.pool", "kvmanager.history"),
    "kvmanager.tier": ("kvmanager.pool_state",),
    "services.gateway.text": ("services.gateway.fleet",),
    "services.gateway.fleet": ("services.gateway.access",),
    "services.gateway.access": ("services.gateway.request_handler", "services.gateway.http"),
    "services.cli.local": ("services.cli.commands",),
}


def check(folder: Path) -> "subprocess.CompletedProcess[str]":
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", command, "--no-cache"], cwd=folder, capture_output=True, text=True, check=False
    )


def test_the_contracts_are_kept() -> None:
    done = check(ROOT)
    assert done.returncode == 0, done.stdout
    assert "15 kept, 0 broken" in done.stdout


@pytest.fixture(scope="module")
def violations(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the report on a copy in which each package makes its forbidden imports."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copy(ROOT / "pyproject.toml", copy)
    for package in ("blocks", "kvmanager", "engine", "services"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    for package, modules in FORBIDDEN.items():
        violation = copy / package.replace(".", "/") / "violation.py"
        violation.write_text("".join(f"import {module}\n" for module in modules))
    done = check(copy)
    assert done.returncode == 1, done.stdout
    return done.stdout


@pytest.mark.parametrize(("package", "module"), [(name, module) for name in FORBIDDEN for module in FORBIDDEN[name]])
def test_a_forbidden_import_is_reported(violations: str, package: str, module: str) -> None:
    shown = module if module.startswith(("services", "engine", "kvmanager")) else module.partition(".")[0]
    assert f"{package}.violation -> {shown} (l." in violations
