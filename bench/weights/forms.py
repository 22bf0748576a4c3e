"""The forms of weights that `bench weights` compares, and their engine processes."""

import json
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from bench.loads.peer import Worker
from bench.report.terms import Terms

COMMAND = (sys.executable, "-m", "bench.weights.worker")


class Form(NamedTuple):
    """Settings of an engine, and the format that its weights then have."""

    settings: Mapping[str, str]
    format: str


# The demo model's file has 4 bits; `auto` keeps them.
FORMS = {
    "float32": Form({"dtype": "float32", "weights": "auto"}, "float32"),
    "bf16": Form({"dtype": "bfloat16", "weights": "bf16"}, "bfloat16"),
    "int8": Form({"dtype": "bfloat16", "weights": "int8"}, "int8"),
    "int4": Form({"dtype": "auto", "weights": "auto"}, "Q4_1"),  # as `quire serve` runs it
    "int8_kv": Form({"dtype": "bfloat16", "weights": "bf16", "kv_dtype": "int8"}, "bfloat16"),
}


class FormWorkers:
    """The engine process of each form; each is stopped while it is not asked."""

    def __init__(self, works: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Start the processes one after another, with workloads by name.

        Raises RuntimeError if the weights of one have another format, as without the kernels that multiply them.
        """
        self._workers: dict[str, Worker] = {}
        try:
            for form, (settings, wanted) in FORMS.items():
                self._workers[form] = Worker(form, [*COMMAND, json.dumps(settings)], first=json.dumps(works) + "\n")
                if (found := self._workers[form].name) != wanted:
                    raise RuntimeError(f"{form}: the weights of the engine are {found}, not {wanted}")
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

    def terms(self) -> dict[str, Terms]:
        """Return the terms of each form that has a process."""
        return {form: worker.terms("") for form, worker in self._workers.items()}

    def program(self, form: str) -> Callable[[str], tuple[float, float | None]]:
        """Return a function from a workload to its seconds and the cores that it used."""

        def run(name: str) -> tuple[float, float | None]:
            worker = self._workers[form]
            return worker.measure(json.dumps({"run": name}))["seconds"], worker.cores_used

        return run
