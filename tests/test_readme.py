"""What the README shows works as shown."""

import re
import subprocess
import sys
from pathlib import Path

from tests.running_quire import RunningQuire

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_python_example_prints_a_continuation(tiny_quire: RunningQuire) -> None:
    codes = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (code,) = [one for one in codes if "127.0.0.1:50051" in one]
    at_this_server = code.replace("127.0.0.1:50051", tiny_quire.addresses["gateway"])
    run = subprocess.run(
        [sys.executable, "-c", at_this_server], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout) > 10


def test_every_file_that_it_links_to_exists() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert len(links) >= 4
    assert [link for link in links if not (Path(__file__).parents[1] / link).exists()] == []
