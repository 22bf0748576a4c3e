"""Only GPUs need Triton."""

import importlib
import sys

import pytest


def test_other_backends_and_the_service_are_imported_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("engine", "services", "triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("engine.native.cpu_backend", "engine.run.runner", "services.engine.startup.assembly"):
        importlib.import_module(name)
    assert not [name for name in sys.modules if name.startswith("engine.triton_kernels")]
