"""docs/alerts-fired.md: its two parts are written by two tests, and each keeps the other's part."""

from tests.deployment.prometheus import ROOT

DIVISOR = 60
PAGE = ROOT / "docs" / "alerts-fired.md"

_ALERTS = f"""# Alerts as they fired

Written by `make alerts-check`: each alert of [alerts.yml](../deploy/prometheus/alerts.yml) was provoked on running
services with a tiny model, and seen to fire in a real Prometheus that scraped them twice a second. All durations of
the rules were divided by {DIVISOR}, so that a minute took a second; thresholds were those for CPUs. Where an alert
speaks of an hour, it was a minute.

| alert | severity | provoked by | fired after | description |
|---|---|---|---|---|
"""
_RELEASES = """
## Two releases in one Prometheus

Two installations with the same names of model and engine, prod and staging. All services of prod were killed, and
later its targets were removed from Prometheus, while staging served its clients. None of these alerts fired for
staging.

| alert | severity | namespace | release | provoked by | fired after | summary |
|---|---|---|---|---|---|---|
"""


def write_alerts(rows: list[str]) -> None:
    """Replace the table of all alerts."""
    _, heading, others = PAGE.read_text().partition(_heading())
    PAGE.write_text(_ALERTS + "".join(f"{row}\n" for row in rows) + heading + others)


def write_releases(rows: list[str]) -> None:
    """Replace the table of the alerts of two releases."""
    alerts, _, _ = PAGE.read_text().partition(_heading())
    PAGE.write_text(alerts + _RELEASES + "".join(f"{row}\n" for row in rows))


def _heading() -> str:
    return _RELEASES.split("\n\n", 1)[0]
