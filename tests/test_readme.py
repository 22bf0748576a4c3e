"""Every example in Python of the README is run by tests/test_documented_commands.py."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_python_examples_are_those_that_are_run() -> None:
    first_lines = re.findall(r"```python\n(.*)", README)
    assert first_lines == ["import grpc", "from openai import OpenAI"]
