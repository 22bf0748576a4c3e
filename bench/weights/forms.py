"""The forms of weights that `bench weights` compares, and their engine processes."""

import json
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from types import TracebackType
from typing import Any

from bench.loads.peer import Worker

# Settings of the engine by form. The demo model's file has 4 bits; `auto` keeps them.
FORMS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bf16": {"weights": "bf16"},
    "int8": {"weights": "int8"},
    "int4": {"weights": "auto"},
    "int8_kv": {"weights": "bf16", "kv_dtype": "int8"},
}


class FormWorkers:
    """The engine process of each form; each is stopped while it is not asked."""

    def __init__(self, works: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Start the processes one after another, with workloads by name."""
        self._workers: dict[str, Worker] = {}
        try:
            for form, settings in FORMS.items():
                command = [sys.executable, "-m", "bench.weights.worker", json.dumps(settings)]
                self._workers[form] = Worker(form, command, first=json.dumps(works) + "\n")
        except BaseException:
            self.keep(())
            raise

    def __enter__(self) -> "FormWorkers":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.keep(())

    def __getitem__(self, form: str) -> Worker:
        return self._workers[form]

    def keep(self, forms: Container[str]) -> None:
        """End the processes of all other forms."""
        for form in [one for one in self._workers if one not in forms]:
            self._workers.pop(form).close()

    def program(self, form: str) -> Callable[[str], float | None]:
        """Return a function from a workload to its seconds."""

        def run(name: str) -> float | None:
            seconds: float = self._workers[form].measure(json.dumps({"run": name}))["seconds"]
            return seconds

        return run
