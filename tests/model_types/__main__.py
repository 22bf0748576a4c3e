"""Serve every causal model type of transformers as tiny checkpoints: `make models`."""

import os
import subprocess
from collections import Counter
from contextlib import suppress

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # cases run side by side

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.model_types.cases import Case, case_named, cases, causal_types
from tests.model_types.judgement import Judgement, judge
from tests.model_types.processes import Bounds, judged
from tests.model_types.results import RESULTS, write_results

_console = Console()


@click.command()
@click.argument("model_types", nargs=-1)
@click.option("--jobs", default=2, show_default=True, help="Cases at the same time.")
@click.option("--seconds", default=Bounds().seconds, show_default=True, help="Time of a case.")
@click.option("--memory-mib", default=Bounds().memory_mib, show_default=True, help="Memory of a case.")
@click.option("--case", "names", multiple=True, help="Only this case, such as 'llama: YaRN'; the file stays as it is.")
def main(model_types: tuple[str, ...], jobs: int, seconds: float, memory_mib: int, names: tuple[str, ...]) -> None:
    """Judge the cases of MODEL_TYPES, all without any, and write them to docs/model-types.json.

    Interrupted, it writes the types that are done.
    """
    if unknown := sorted(set(model_types) - set(causal_types())):
        raise click.BadParameter(f"transformers has no causal models of type {', '.join(unknown)}")
    chosen = [case_named(name) for name in names] or cases(model_types)
    commit = _commit()
    found = _judged(chosen, Bounds(seconds, memory_mib), jobs)
    if not names:
        done = _done(chosen, found)
        whole = not model_types and len(done) == len(causal_types())
        write_results(RESULTS, found, commit, () if whole else done)
    _show(found, whole=len(chosen) > 10)


def _judged(chosen: list[Case], bounds: Bounds, jobs: int) -> dict[str, Judgement]:
    found = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=_console) as progress:
        task = progress.add_task("model types", total=len(chosen))
        with suppress(KeyboardInterrupt):
            for case, judgement in judged(chosen, judge, bounds, jobs):
                found[case.name] = judgement
                progress.update(task, advance=1, description=case.name)
    return found


def _done(chosen: list[Case], found: dict[str, Judgement]) -> set[str]:
    """Return the types all of whose cases are judged."""
    return {case.model_type for case in chosen} - {case.model_type for case in chosen if case.name not in found}


def _show(found: dict[str, Judgement], *, whole: bool) -> None:
    """Print cases, of many those that need attention, and the counts of outcomes."""
    for name in sorted(found):
        one = found[name]
        if not whole or one.outcome in ("wrong", "crash", "too long") or one.plan:
            reasons = "; ".join(filter(None, (one.reason, one.plan)))
            _console.print(f"{name}: {one.outcome} ({one.tokens} tokens) {reasons}", markup=False, soft_wrap=True)
    counts = Counter(one.outcome for one in found.values())
    _console.print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))


def _commit() -> str:
    asked = ["git", "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(asked, capture_output=True, check=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
