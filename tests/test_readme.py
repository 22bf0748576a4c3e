"""The examples of the README work as shown."""

import re
import subprocess
import sys
from pathlib import Path

from tests.running_quire import CALL_SECONDS, RunningQuire

# The example samples without a seed, and a random model may end its text at once.
MOST_RUNS = 10

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_python_example_prints_a_continuation(tiny_quire: RunningQuire) -> None:
    codes = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (code,) = [one for one in codes if "127.0.0.1:50051" in one]
    at_this_server = code.replace("127.0.0.1:50051", tiny_quire.addresses["gateway"])
    printed: list[str] = []
    while len(printed) < MOST_RUNS and not any(len(text) > 10 for text in printed):
        run = subprocess.run(
            [sys.executable, "-c", at_this_server], capture_output=True, text=True, timeout=CALL_SECONDS, check=False
        )
        assert run.returncode == 0, run.stderr
        printed.append(run.stdout)
    assert len(printed[-1]) > 10, printed
