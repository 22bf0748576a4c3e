"""The progress of a batch."""

from pathlib import Path

import pytest

from services.cli.batch.answers import AnswerFile
from services.cli.batch.display import Bar
from services.cli.batch.plan import BatchPlan
from services.cli.batch.run import Totals


def test_without_a_terminal_a_line_of_progress_is_printed_every_half_minute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    requests = tmp_path / "requests.jsonl"
    requests.write_text("")
    plan = BatchPlan(requests, "requests.jsonl", AnswerFile(tmp_path / "answers.jsonl"), lines=1_200, kept=100)
    with Bar(plan, lambda: now) as bar:
        for second in range(1, 66):
            now = float(second)
            bar(Totals(answers=10 * second, generated_tokens=500 * second))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["400 of 1200 requests answered, 500 tokens/s", "700 of 1200 requests answered, 500 tokens/s"]
