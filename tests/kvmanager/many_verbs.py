"""Runs a number of random verbs through a pool with window kinds and its naive twin: `python -m ...many_verbs 5000000`.

Ends with an error at the first difference, and prints the Steps that lead to it.
"""

import argparse

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from rich.console import Console
from rich.progress import Progress

from tests.kvmanager.test_random_kinds import RandomKinds

_RUNS = 500
_STEPS_OF_A_REPORT = 10
_STEPS = 12


class CountedKinds(RandomKinds):
    """Counts the verbs of all runs, and those that were refused."""

    verbs = refused = steps = 0

    def check_report(self):
        """A report takes as long as ten Steps; each adoption is a check of its own."""
        CountedKinds.steps += 1
        if not CountedKinds.steps % _STEPS_OF_A_REPORT:
            super().check_report()

    def apply(self, **items):
        super().apply(**items)
        CountedKinds.verbs += sum(map(len, items.values()))
        CountedKinds.refused += len(self.twin.answer["refusals"])


def main() -> None:
    """Run random Steps until the number of verbs is reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verbs", type=int)
    asked = parser.parse_args().verbs
    sizes = settings(
        max_examples=_RUNS,
        stateful_step_count=_STEPS,
        derandomize=False,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    with Progress() as progress:
        task = progress.add_task("verbs", total=asked)
        while CountedKinds.verbs < asked:
            run_state_machine_as_test(CountedKinds, settings=sizes)
            progress.update(task, completed=CountedKinds.verbs)
    Console().print(f"{CountedKinds.verbs:,} verbs, {CountedKinds.refused:,} of them refused: no difference")


if __name__ == "__main__":
    main()
