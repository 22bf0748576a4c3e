"""What every benchmark writes: its rows beside the machine, the versions and the commit they were measured on."""

import json
import platform
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from operator import ge, le, lt
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
_MEETS: dict[str, Callable[[float, float], bool]] = {"less": lt, "at most": le, "more": ge}
_PACKAGES = ("torch", "transformers", "grpcio", "protobuf")


@dataclass(frozen=True)
class Row:
    """One measured figure. `peer` names what it is compared with; `target` is None where none was set."""

    metric: str
    value: float | None
    unit: str
    peer: str | None
    target: float | None
    met: bool | None


def row(benchmark: str, metric: str, value: float | None, unit: str, peer: str | None = None) -> Row:
    """Make a row, with the target that `bench/targets.toml` sets for it."""
    targets = tomllib.loads((ROOT / "bench" / "targets.toml").read_text())
    target = targets.get(benchmark, {}).get(metric)
    return Row(metric, value, unit, peer, target and target["target"], met(value, target))


def met(value: float | None, target: dict[str, Any] | None) -> bool | None:
    """Say whether a value meets its target: None without a target, False for what was not measured."""
    if target is None:
        return None
    if value is None:
        return False
    return _MEETS[target["better"]](value, target["target"])


def publish(benchmark: str, rows: list[Row], repetitions: int, **more: Any) -> None:
    """Print the rows as a table, and write them to `bench/results/<benchmark>.json`."""
    table = Table("metric", "value", "unit", "peer", "target", "met", title=benchmark)
    for one in rows:
        table.add_row(*("" if value is None else str(value) for value in asdict(one).values()))
    Console().print(table)
    result = {
        "benchmark": benchmark,
        "hardware": {"cpu": _cpu(), "cores": _cores(), "machine": platform.machine()},
        "versions": {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES},
        "commit": _commit(),
        "repetitions": repetitions,
        "rows": [asdict(one) for one in rows],
        **more,
    }
    path = ROOT / "bench" / "results" / f"{benchmark}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _cores() -> int:
    return sum(line.startswith("processor") for line in Path("/proc/cpuinfo").read_text().splitlines())


def _commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return described.stdout.strip()
