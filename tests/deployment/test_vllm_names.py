"""The recording rules of vLLM's names, as files."""

import subprocess
from pathlib import Path

from deploy.prometheus.vllm_rules import vllm_rules
from tests.deployment.prometheus import CONFIGURATION

RULES = CONFIGURATION.with_name("vllm-rules.yml")
CASES = Path(__file__).with_name("vllm-rules-test.yml")


def test_the_rules_equal_the_table() -> None:
    assert vllm_rules() == RULES.read_text(), "run make rules"


def test_promtool_accepts_the_rules_and_they_pass_its_cases(commands: Path, tmp_path: Path) -> None:
    cases = tmp_path / "cases.yml"
    cases.write_text(CASES.read_text().replace("RULES", str(RULES)))
    for arguments in (("check", "rules", RULES), ("test", "rules", cases)):
        done = subprocess.run([commands / "promtool", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
