"""The contracts of import-linter in pyproject.toml are kept, and forbid at least the imports listed here."""

import ast
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
    "services.engine": ("services.kvmanager", "services.gateway", "simulation"),
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
    assert "17 kept, 0 broken" in done.stdout


@pytest.fixture(scope="module")
def violations(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the report on a copy in which each package makes its forbidden imports."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copy(ROOT / "pyproject.toml", copy)
    for package in ("blocks", "kvmanager", "engine", "services", "simulation"):
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


@pytest.mark.parametrize("module", ["cli.commands.serve", "kvmanager.server", "gateway.server"])
def test_processes_without_tensors_start_without_torch(module: str) -> None:
    code = f"import services.{module}, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_tests_that_make_test_leaves_out_import_only_names_that_exist() -> None:
    exported = {file: _names_of(ast.parse(file.read_text())) for file in (ROOT / "tests").rglob("*.py")}
    missing = [
        f"{file.relative_to(ROOT)}: {node.module}.{alias.name}"
        for file in exported
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests.")
        for alias in node.names
        if alias.name not in exported.get(ROOT / f"{node.module.replace('.', '/')}.py", {alias.name})
    ]
    assert not missing


def _names_of(module: ast.Module) -> set[str]:
    """Return the names that a module defines or imports at its top level, including conditional ones."""
    names = {node.id for node in ast.walk(module) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return names
