"""Writes the rules of this folder: `python -m deploy.prometheus`.

With --preset it writes alerts to standard output instead, with the thresholds that --set changes, and links to the
runbooks at --runbook-url:

    python -m deploy.prometheus --preset gpu --set firstTokenSeconds=5 > deploy/prometheus/alerts-own.yml
"""

import argparse
import re
import sys

from deploy.prometheus.rules import FOLDER, RUNBOOK_URL, RUNBOOKS, alerts, files
from deploy.prometheus.thresholds import PRESETS, THRESHOLDS, UnknownThreshold, changed, preset


def main() -> None:
    """Write the files, report stale ones, or write alerts to standard output."""
    parser = argparse.ArgumentParser(
        "python -m deploy.prometheus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{one.name:18} {one.meaning} (cpu {one.cpu:g}, gpu {one.gpu:g})" for one in THRESHOLDS),
    )
    parser.add_argument("--check", action="store_true", help="Write nothing; exit with 1 if a file is stale.")
    parser.add_argument("--preset", choices=PRESETS, help="Write alerts with these thresholds to standard output.")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=NUMBER", help="Change a threshold.")
    parser.add_argument(
        "--runbook-url",
        metavar="URL",
        help=f"Address of the page of runbooks, before an alert's anchor. Default: {RUNBOOKS}, in the repository.",
    )
    arguments = parser.parse_args()
    if arguments.preset:
        try:
            values = changed(preset(arguments.preset), map(_given, arguments.set))
            sys.stdout.write(alerts(values, _runbook_url(arguments.runbook_url or RUNBOOKS)))
        except (UnknownThreshold, WrongRunbookURL) as reason:
            parser.error(str(reason))
    elif arguments.set or arguments.runbook_url:
        parser.error(f"{'--set' if arguments.set else '--runbook-url'} needs --preset")
    else:
        _write(check=arguments.check)


class WrongRunbookURL(Exception):
    """It is no address to which an anchor can be added."""


def _runbook_url(given: str) -> str:
    if not re.match(RUNBOOK_URL, given):
        raise WrongRunbookURL(f"--runbook-url {given}: it must be http://... or https://..., without an anchor")
    return given


def _given(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name, float(number)
    except ValueError:
        raise UnknownThreshold(f"--set {text}: it must be NAME=NUMBER") from None


def _write(check: bool) -> None:
    stale = {path: text for path, text in files().items() if not path.exists() or path.read_text() != text}
    if check and stale:
        sys.exit(f"rules are stale ({', '.join(str(path.relative_to(FOLDER)) for path in stale)}): run make rules")
    for path, text in stale.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
