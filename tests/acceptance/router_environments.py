"""Routers of other stacks, and their consumers of KV events, in environments of their own. See routers/."""

from pathlib import Path

from tests.acceptance.python_environments import PythonEnvironment

ROUTERS = Path(__file__).parent / "routers"


def router_environment(name: str) -> PythonEnvironment:
    """Return the environment of a router: `vllm-router`, `sglang-router`, `smg` or `dynamo`."""
    return PythonEnvironment(name, ROUTERS / f"requirements-{name}.txt")
