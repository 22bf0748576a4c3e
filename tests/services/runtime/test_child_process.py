"""Children that run Python do not import files of the current folder."""

import subprocess
from pathlib import Path

from services.runtime import child_process

SERVICES = Path(__file__).parents[3] / "services"


def test_a_module_of_the_current_folder_does_not_reach_a_child(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('imported from the current folder')")
    command = child_process.python_command("-m", "services.cli.main", "instances")
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0
    assert [path.stem for path in SERVICES.rglob("*.py") if "sys.executable" in path.read_text()] == ["child_process"]
