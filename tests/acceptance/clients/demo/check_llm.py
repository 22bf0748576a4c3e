"""The command `llm` with a server in its extra-openai-models.yaml."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ASK = "Which animal is it?"
SHORT = ("-o", "max_tokens", "12", "-o", "seed", "3")
TOOLS = '''
def look(place: str) -> str:
    """Look at the animal."""
    return "It barks."
'''
MODEL = """
- model_id: quire
  model_name: demo
  api_base: "{base_url}"
  supports_tools: true
  supports_schema: true
"""


@pytest.fixture
def folder(base_url: str, tmp_path: Path) -> Path:
    (tmp_path / "extra-openai-models.yaml").write_text(MODEL.format(base_url=base_url))
    return tmp_path


def llm(folder: Path, *arguments: str) -> str:
    environment = os.environ | {"LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"}
    command = [sys.executable, "-m", "llm", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_stream_is_the_whole_answer(folder: Path) -> None:
    streamed = llm(folder, "-m", "quire", ASK, *SHORT)
    assert streamed.strip()
    assert llm(folder, "-m", "quire", ASK, *SHORT, "--no-stream") == streamed


def test_a_conversation_is_continued(folder: Path) -> None:
    llm(folder, "-m", "quire", "-s", "Be brief.", ASK, *SHORT)
    assert llm(folder, "-c", "And another one?", *SHORT).strip()


def test_an_output_follows_a_schema(folder: Path) -> None:
    schema = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"]}
    schema |= {"additionalProperties": False}
    output = llm(folder, "-m", "quire", ASK, "--schema", json.dumps(schema), "-o", "max_tokens", "60")
    assert json.loads(output)["kind"] in ("cat", "dog")


def test_tools_are_called_or_not(folder: Path) -> None:
    output = llm(folder, "-m", "quire", ASK, "--functions", TOOLS, "--chain-limit", "2", *SHORT)
    assert isinstance(output, str)
