"""Results of the check of the stack, for docs/compose-check.md."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tests.deployment.compose.stack import ROOT, compose_command, docker, image_label, missing_images, run

PATH = ROOT / "docs" / "compose-check.md"
_MEGABYTE = 1_000_000
_HOW = (
    "Two engines, two gateways, TLS and API keys on. Clients send greedy requests repeatedly while",
    "`deploy/compose/rolling_restart.sh` restarts a service's containers one after the other. Every answer had the",
    "tokens of an undisturbed run. Engines had a grace period of half a second, so that running requests fail over.",
)
_COLUMNS = ("service", "containers", "requests", "failed", "tokens", "failed over")
_COLUMNS += ("longest pause in a stream", "undisturbed")


@dataclass(frozen=True)
class Restart:
    """Requests during the restart of one service's containers."""

    service: str
    containers: int
    requests: int
    tokens: int
    failed_over: int
    longest_pause: float
    undisturbed_pause: float

    def row(self) -> str:
        pauses = f"{self.longest_pause:.1f} s | {self.undisturbed_pause:.1f} s"
        counts = f"{self.containers} | {self.requests} | 0 | {self.tokens} | {self.failed_over}"
        return f"| {self.service} | {counts} | {pauses} |"


@dataclass
class Report:
    """Collected while the tests run."""

    outcomes: list[tuple[str, str, float]] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)  # that tests measured

    def text(self) -> str:
        lines = [
            "# Compose check",
            "",
            "Written by `make compose-check` when it last passed: the image of this source, built and run with",
            "`docker-compose.yml`.",
            "",
            *(f"* {line}" for line in (*_circumstances(), *self.facts)),
            "",
            "## Restarts under load",
            "",
            *_HOW,
            "",
            f"| {' | '.join(_COLUMNS)} |",
            f"|{'---|' * len(_COLUMNS)}",
            *(restart.row() for restart in self.restarts),
            "",
            "## Results",
            "",
            *(f"* {sentence}: {outcome}, {seconds:.1f} s" for sentence, outcome, seconds in self.outcomes),
            "",
        ]
        return "\n".join(lines)

    def write(self, path: Path = PATH) -> None:
        path.write_text(self.text())


def _circumstances() -> list[str]:
    commit = run("git", "rev-parse", "--short", "HEAD").stdout.strip() or "unknown"
    server = docker("version", "--format", "{{(index .Server.Components 0).Name}} {{.Server.Version}}").strip()
    compose = run(*compose_command(), "version", "--short").stdout.strip()
    size = int(docker("image", "inspect", "quire", "--format", "{{.Size}}")) / _MEGABYTE
    own = int(docker("run", "--rm", "--entrypoint", "du", "quire", "-sb", "/opt/quire").split()[0]) / _MEGABYTE
    return [
        f"{datetime.now(UTC):%Y-%m-%d}, Quire {version('quire')} on top of {commit}",
        f"{server}, docker compose {compose}",
        f"image: {own:.0f} MB above its base of {size - own:.0f} MB, {image_label('base.name')}",
        *(f"without the image {image}: no registry with it could be reached" for image in missing_images()),
    ]
