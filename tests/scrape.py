"""Reads the metrics page of a service."""

import urllib.request
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

SCRAPE_SECONDS = 60


class Scrape:
    """The metrics of one service at one moment."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples: list[Sample] = [sample for family in self.families.values() for sample in family.samples]

    @classmethod
    def of(cls, url: str) -> "Scrape":
        with urllib.request.urlopen(url, timeout=SCRAPE_SECONDS) as answer:
            return cls(answer.read().decode())

    def value(self, name: str, **labels: str) -> float:
        """Return the value of the only sample with this name and these labels."""
        (sample,) = self._matching(name, labels)
        return sample.value

    def values(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return the values of samples by one of their labels."""
        return {sample.labels[label]: sample.value for sample in self._matching(name, labels)}

    def has(self, name: str) -> bool:
        return any(self._matching(name, {}))

    def _matching(self, name: str, labels: dict[str, str]) -> Iterable[Sample]:
        return [
            sample for sample in self.samples if sample.name == name and labels.items() <= dict(sample.labels).items()
        ]
