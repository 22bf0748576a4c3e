"""Peers are measured by scripts in their own environments."""

import sys
from pathlib import Path

import psutil
import pytest

from bench.loads.class_limits import incomparable
from bench.loads.peer import Peer, Worker
from bench.report.terms import Terms
from engine.native import cpu_class
from tests.faults import wait_until

SCRIPT = """
import json, sys
factor = json.loads(sys.stdin.readline())["factor"]
terms = {"weights": "int8", "threads": 2}
print(json.dumps({"name": "Other 1.0", "terms": terms}), flush=True)
for number, _ in enumerate(sys.stdin, 1):
    print(json.dumps({"free_us": factor * number}), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "other_blocks.py"
    path.write_text(SCRIPT)
    return path


def test_a_peer_is_measured_once_for_each_repetition_and_compared_with(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER_PYTHON", sys.executable)
    with Peer(script, "OTHER_PYTHON", {"factor": 10}) as peer:
        for _ in range(3):
            peer.measure()
    own, ratio = peer.rows("demo", ["free_us"], [{"free_us": 5.0}] * 3)
    assert (own.metric, own.value, own.unit, own.peer) == ("other_free_us", 20.0, "us", "Other 1.0")
    assert (ratio.metric, ratio.value, ratio.unit, ratio.peer) == ("free_us_over_other", 0.25, "ratio", "Other 1.0")


def test_rows_of_a_missing_peer_have_no_value_and_name_it(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTHER_PYTHON", raising=False)
    with Peer(script, "OTHER_PYTHON", {"factor": 10}) as peer:
        peer.measure()
    rows = peer.rows("demo", ["free_us"], [{"free_us": 5.0}])
    assert [row.value for row in rows] == [None, None]
    assert {row.peer for row in rows} == {"other did not run: OTHER_PYTHON is not set"}


def test_a_peer_receives_its_model_and_does_not_run_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_PYTHON", sys.executable)
    monkeypatch.delenv("OTHER_MODEL", raising=False)
    script = tmp_path / "other_blocks.py"
    script.write_text("import json, sys; print(json.dumps({'name': sys.argv[1]}), flush=True); sys.stdin.read()")
    peer = Peer(script, "OTHER_PYTHON", {}, label="other_int8", model="OTHER_MODEL")
    assert (peer.name, peer.missing) == (None, "other_int8 did not run: OTHER_MODEL is not set")
    monkeypatch.setenv("OTHER_MODEL", "/no/such/folder")
    peer = Peer(script, "OTHER_PYTHON", {}, model="OTHER_MODEL")
    assert peer.missing == "other did not run: OTHER_MODEL names /no/such/folder, which does not exist"
    monkeypatch.setenv("OTHER_MODEL", str(tmp_path))
    with Peer(script, "OTHER_PYTHON", {}, model="OTHER_MODEL") as peer:
        assert (peer.label, peer.name) == ("other", str(tmp_path))


def test_a_peer_that_cannot_run_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_PYTHON", sys.executable)
    script = tmp_path / "other_blocks.py"
    script.write_text("import sys; sys.exit(3)")
    with pytest.raises(RuntimeError, match="other ended with 3"):
        Peer(script, "OTHER_PYTHON", {})


def test_a_peer_whose_kernels_cannot_be_kept_to_the_selected_class_does_not_run(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER_PYTHON", sys.executable)
    monkeypatch.setattr("bench.loads.peer.device_of", lambda _: "avx2")
    monkeypatch.setattr(cpu_class, "supported", lambda: cpu_class.CLASSES)
    peer = Peer(script, "OTHER_PYTHON", {}, label="openvino_int8")
    assert (peer.name, peer.missing) == (None, "openvino_int8 did not run: its kernels cannot be kept to avx2")
    assert incomparable("vllm", "avx2") is None
    assert incomparable("openvino", cpu_class.CLASSES[0].name) is None
    assert incomparable("openvino", "other-cpu") is None


@pytest.mark.skipif("avx2" not in {one.name for one in cpu_class.supported()}, reason="this CPU has no AVX2")
def test_a_peer_is_kept_to_the_selected_class_of_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_PYTHON", sys.executable)
    monkeypatch.setenv(cpu_class.VARIABLE, "avx2")
    script = tmp_path / "other_blocks.py"
    script.write_text(
        "import json, os; print(json.dumps({'name': os.environ['ONEDNN_MAX_CPU_ISA']}), flush=True); input()"
    )
    with Peer(script, "OTHER_PYTHON", {}) as peer:
        assert peer.name == "AVX2"


def test_a_peer_states_its_terms(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_PYTHON", sys.executable)
    with Peer(script, "OTHER_PYTHON", {"factor": 10}) as peer:
        assert peer.terms("b8") == {"other": Terms(weights="int8", threads=2, work="b8")}
    monkeypatch.delenv("OTHER_PYTHON")
    assert Peer(script, "OTHER_PYTHON", {}).terms("b8") == {}


def test_a_worker_that_does_not_state_its_name_and_terms_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "silent.py"
    script.write_text("print('Other 1.0', flush=True)\ninput()")
    with pytest.raises(RuntimeError, match=r"old printed 'Other 1\.0' instead of"):
        Worker("old", [sys.executable, script])


def test_the_cores_that_a_worker_and_its_children_use_are_counted(tmp_path: Path) -> None:
    script = tmp_path / "busy.py"
    script.write_text(
        "import json, subprocess, sys, time\nprint(json.dumps({'name': 'busy'}), flush=True)\n"
        "busy = 'import time\\nwhile time.process_time() < 0.3: pass'\n"
        "while input():\n    subprocess.run([sys.executable, '-c', busy])\n    print('{}', flush=True)"
    )
    with Worker("busy", [sys.executable, script]) as worker:
        worker.measure("go")
        assert worker.cores_used is not None
        assert worker.cores_used > 0.2


def test_a_worker_is_stopped_between_its_turns(tmp_path: Path) -> None:
    script = tmp_path / "busy.py"
    script.write_text(
        "import json, os\nprint(json.dumps({'name': str(os.getpid())}), flush=True)\n"
        "while input(): print('{\"figure\": 1}', flush=True)"
    )
    with Worker("busy", [sys.executable, script]) as worker:
        process = psutil.Process(int(worker.name))

        def stopped() -> bool:
            return process.status() == psutil.STATUS_STOPPED

        for _ in range(2):
            wait_until(stopped, "the worker is stopped")  # a signal takes effect later
            assert worker.measure("go") == {"figure": 1}
        wait_until(stopped, "the worker is stopped")
        worker.measure("go")
    assert not process.is_running()
