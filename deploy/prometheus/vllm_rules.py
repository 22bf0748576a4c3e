"""Writes vllm-rules.yml to standard output: vLLM's names for our metrics, as recording rules.

The table is services/runtime/metrics/vllm_names.py.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from services.runtime.metrics.vllm_names import COUNTERPARTS, Counterpart

_HEAD = """\
# vLLM's names for Quire's metrics, for whoever does not start the services with --metrics-compat vllm: name this file
# under rule_files, as prometheus.yml does. With both, each series would be there twice.
#
# Made by deploy/prometheus/vllm_rules.py (make rules).
groups:
  - name: vllm
    interval: 5s  # as often as the services are scraped: rates over short times need it
    rules:
"""


def rules() -> str:
    """Return the file's text."""
    return _HEAD + "".join(
        f"      - record: {json.dumps(record)}\n        expr: {json.dumps(expression)}\n"
        for counterpart in COUNTERPARTS
        for record, expression in _rules_of(counterpart)
    )


def _rules_of(counterpart: Counterpart) -> Iterator[tuple[str, str]]:
    for name in counterpart.theirs:
        for suffix in counterpart.suffixes:
            yield name + suffix, " or ".join(_expressions(counterpart, counterpart.ours + suffix))


def _expressions(counterpart: Counterpart, series: str) -> Iterator[str]:
    """Yield what the series are in vLLM's words: one expression for each word."""
    if not counterpart.words:
        yield series
    for label, words in counterpart.words.items():
        for ours, theirs in words.items():
            yield f'label_replace({series}{{{label}="{ours}"}}, "{label}", "{theirs}", "", "")'


if __name__ == "__main__":
    sys.stdout.write(rules())
