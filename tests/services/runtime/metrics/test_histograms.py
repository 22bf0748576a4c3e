"""Histograms that are exported like those of prometheus-client."""

import random

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.runtime.metrics.histograms import Buckets, Histogram

BOUNDS = (0.001, 0.01, 0.5, 1.0, 20.0)


def test_a_histogram_is_exported_like_the_librarys() -> None:
    draw = random.Random(1)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    one = Histogram(ours, "seconds", "Of something.", ("a", "b"), BOUNDS)
    other = prometheus_client.Histogram("seconds", "Of something.", ("a", "b"), buckets=BOUNDS, registry=theirs)
    for _ in range(500):
        labels = draw.choice([("x", "y"), ("x", 'quoted "z"')])
        value = draw.choice([*BOUNDS, 0.0, draw.uniform(0, 30)])
        one.labels(*labels).observe(value)
        other.labels(*labels).observe(value)
    shown = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == shown


def test_a_value_observed_several_times_counts_as_often() -> None:
    buckets = Buckets(BOUNDS)
    buckets.observe(0.5, 3)
    buckets.observe(100.0)
    assert buckets.read() == ([0, 0, 3, 3, 3, 4], 101.5)


def test_a_series_is_shown_from_its_first_use_until_it_is_removed() -> None:
    registry = CollectorRegistry()
    histogram = Histogram(registry, "seconds", "Of something.", ("a",), BOUNDS)
    assert "seconds_count" not in generate_latest(registry).decode()
    histogram.labels("x")
    assert 'seconds_count{a="x"} 0.0' in generate_latest(registry).decode()
    histogram.remove("x")
    histogram.remove("never there")
    assert "seconds_count" not in generate_latest(registry).decode()


def test_two_histograms_of_one_name_are_refused() -> None:
    registry = CollectorRegistry()
    Histogram(registry, "seconds", "Of something.", (), BOUNDS)
    with pytest.raises(ValueError, match="seconds"):
        Histogram(registry, "seconds", "Of something.", (), BOUNDS)
