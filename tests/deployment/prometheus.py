"""A real Prometheus, installed or from Debian's package, with the project's configuration."""

import json
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from services.models.model_store import build_once, default_cache
from tests.running_quire import Output

ROOT = Path(__file__).parents[2]
CONFIGURATION = ROOT / "deploy" / "prometheus" / "prometheus.yml"
ALERTS = CONFIGURATION.with_name("alerts.yml")
NAMESPACE = "llm"
PACKAGE_SECONDS = 180
QUERY_SECONDS = 60
STOP_SECONDS = 60
WAIT_SECONDS = 90
PAUSE_SECONDS = 0.1

Series = dict[str, Any]


class NoPrometheus(Exception):
    """Prometheus is not installed and cannot be downloaded."""


def prometheus_folder() -> Path:
    """Return the folder with prometheus and promtool; without an installed one, unpack Debian's package into the cache.

    Raises NoPrometheus.
    """
    installed = shutil.which("prometheus")
    if installed and shutil.which("promtool"):
        return Path(installed).parent
    unpacked = default_cache().parent / "prometheus"
    build_once(unpacked, _unpack, lambda *_: None)
    return unpacked / "usr" / "bin"


def _unpack(workshop: Path) -> Path:
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise NoPrometheus("prometheus is not installed, and without apt-get and dpkg it cannot be downloaded")
    apt = workshop / "package"
    (apt / "lists").mkdir(parents=True)
    own = [f"-oDir::State::lists={apt / 'lists'}", f"-oDir::Cache={apt}", "-oAPT::Sandbox::User=root"]
    own += ["-oAcquire::Retries=3"]
    try:
        for command in (
            ["apt-get", *own, "-qq", "update"],
            ["apt-get", *own, "-qq", "download", "prometheus"],
        ):
            subprocess.run(command, cwd=apt, check=True, capture_output=True, text=True, timeout=PACKAGE_SECONDS)
        (package,) = apt.glob("prometheus_*.deb")
        unpacked = workshop / "unpacked"
        subprocess.run(["dpkg", "-x", package, unpacked], check=True, capture_output=True, text=True)
    except subprocess.TimeoutExpired as error:
        raise NoPrometheus("the download of Debian's package prometheus timed out") from error
    except subprocess.CalledProcessError as error:
        raise NoPrometheus(
            f"the download of Debian's package prometheus failed: {error.stderr.strip()[-300:]}"
        ) from error
    return unpacked


class RunningPrometheus:
    """Scrapes services and evaluates rules once in every `interval`.

    `targets` maps the configuration's names to addresses, comma-separated if there are several; `rules` maps names
    of rule files to their texts. Scraped metrics whose names match `dropped` are not stored.
    """

    def __init__(
        self,
        commands: Path,
        folder: Path,
        targets: dict[str, str],
        rules: Mapping[str, str] = MappingProxyType({}),
        interval: str = "1s",
        dropped: str = "",
    ) -> None:
        self._configuration = configuration = folder / "prometheus.yml"
        self._interval = interval
        for name, text in rules.items():
            (folder / name).write_text(text)
        configuration.write_text(_configured(CONFIGURATION.read_text(), targets, interval, dropped))
        self.process = subprocess.Popen(
            [
                commands / "prometheus",
                f"--config.file={configuration}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._output = Output(self.process)
        line = self._output.wait_for("TLS is disabled")
        self.url = "http://" + line.split("address=")[1].split()[0]
        self._output.wait_for("Server is ready")

    def watch(self, releases: Mapping[str, dict[str, str]]) -> None:
        """Scrape the targets of these releases instead, by the labels `namespace` and `release`."""
        self._configuration.write_text(_of_releases(CONFIGURATION.read_text(), releases, self._interval))
        self.process.send_signal(signal.SIGHUP)
        self.wait_until(f"count(up) == {sum(map(len, releases.values()))}")

    def query(self, expression: str, **at: float) -> list[Series]:
        """Run an instant query, for now or for a `time` in seconds since 1970."""
        return self._get("query", query=expression, **at)

    def query_range(self, expression: str, start: float, end: float, step: float = 1.0) -> list[Series]:
        """Run a query at every `step` seconds from `start` to `end`, in seconds since 1970."""
        return self._get("query_range", query=expression, start=start, end=end, step=step)

    def wait_until(self, expression: str) -> None:
        """Wait until a query returns data."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.query(expression):
            assert time.monotonic() < deadline, f"{expression} stays empty"
            time.sleep(PAUSE_SECONDS)  # the API has no notifications; the scraped services need the processor

    def wait_for_scrapes(self, moment: float) -> None:
        """Wait for a scrape of each target after a moment in seconds since 1970; earlier scrapes are then stored."""
        self.wait_until(f"count(timestamp(up) > {moment}) == count(up)")

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=STOP_SECONDS)
        finally:
            self.process.kill()
            self._output.finish()

    def alerts(self) -> list[Series]:
        """Return pending and firing alerts with their labels, annotations and values."""
        return self._data("alerts")["alerts"]  # type: ignore[no-any-return]

    def _get(self, call: str, **parameters: Any) -> list[Series]:
        return self._data(call, **parameters)["result"]  # type: ignore[no-any-return]

    def _data(self, call: str, **parameters: Any) -> Any:
        url = f"{self.url}/api/v1/{call}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=QUERY_SECONDS) as answer:
            return json.load(answer)["data"]


def _configured(text: str, targets: dict[str, str], interval: str, dropped: str) -> str:
    """Replace the configuration's interval and addresses, and drop metrics."""
    configuration, left = _at(text, interval), dict(targets)
    for job in configuration["scrape_configs"]:
        addresses = [address for name in _names(job) for address in left.pop(name).split(",") if address]
        job["static_configs"] = [{"targets": addresses}]
        if dropped:
            job["metric_relabel_configs"] = [{"source_labels": ["__name__"], "regex": dropped, "action": "drop"}]
    assert not left, f"{', '.join(left)} not scraped"
    return str(yaml.safe_dump(configuration))


def _of_releases(text: str, releases: Mapping[str, dict[str, str]], interval: str) -> str:
    """Replace the configuration's interval, addresses and labels."""
    configuration = _at(text, interval)
    for job in configuration["scrape_configs"]:
        del job["relabel_configs"]
        (name,) = _names(job)
        job["static_configs"] = [
            {"targets": [targets[name]], "labels": {"namespace": NAMESPACE, "release": release}}
            for release, targets in releases.items()
        ]
    return str(yaml.safe_dump(configuration))


def _at(text: str, interval: str) -> Any:
    return yaml.safe_load(
        re.sub(r"(scrape_interval|scrape_timeout|evaluation_interval): \d+s", rf"\1: {interval}", text)
    )


def _names(job: dict[str, Any]) -> list[str]:
    """Remove the job's discovery, and return its names."""
    return [name for found in job.pop("dns_sd_configs", []) for name in found["names"]]
