"""Takes the place of hypothesis where it is missing, as on a GPU machine with few packages: its tests are skipped."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest


class _Anything:
    """Strategies, settings and profiles, which no skipped test uses."""

    def __getattr__(self, name: str) -> "_Anything":
        return self

    def __call__(self, *_: Any, **__: Any) -> "_Anything":
        return self

    def __or__(self, other: object) -> "_Anything":
        return self


def _unchanged(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda test: test


def _skipped(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return pytest.mark.skip(reason="hypothesis is not installed")


class _Settings(_Anything):
    def __call__(self, *_: Any, **__: Any) -> Any:
        return _unchanged()


def install() -> None:
    """Make `import hypothesis` find it."""
    module, strategies = ModuleType("hypothesis"), _Anything()
    module.__spec__ = ModuleSpec("hypothesis", None)  # torch asks for it
    for name, value in {
        "given": _skipped,
        "example": _unchanged,
        "settings": _Settings(),
        "strategies": strategies,
        "HealthCheck": strategies,
    }.items():
        setattr(module, name, value)
    sys.modules["hypothesis"] = module
