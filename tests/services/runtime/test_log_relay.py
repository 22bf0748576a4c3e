"""The log of process 1: every line is JSON, however it was written."""

import json
import signal
import subprocess
import sys

import pytest

from services.runtime.logs.relay import service_with_json_log
from tests.running_quire import CALL_SECONDS

START = "import os, sys; from services.runtime.logs.relay import relay_child; relay_child('engine');"


def started(code: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", START + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_plain_lines_of_both_outputs_become_records_and_json_stays() -> None:
    own = '{"message": "a", "level": "INFO"}'
    child = started(f"os.write(1, b'one\\n'); os.write(2, b'{own}\\ntwo'); sys.exit(3)")
    output, lines = child.communicate(timeout=CALL_SECONDS)
    one, kept, two = map(json.loads, lines.splitlines())
    assert (output, child.returncode) == ("", 3)
    assert kept == json.loads(own)
    assert [one.pop("message"), two.pop("message")] == ["one", "two"]
    assert one.pop("time") <= two.pop("time")
    assert one == two == {"level": "WARNING", "service": "engine", "logger": "output"}


def test_the_last_lines_of_a_crash_and_its_signal_are_logged() -> None:
    child = started("os.write(2, b'terminate called\\n'); os.abort()")
    lines = child.communicate(timeout=CALL_SECONDS)[1].splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["terminate called", "engine was ended by SIGABRT"]
    assert child.returncode == 128 + signal.SIGABRT


def test_a_stop_signal_reaches_the_service() -> None:
    child = started(
        "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit('drained'));"
        "print('up', flush=True); signal.pause()"
    )
    assert child.stderr is not None
    assert json.loads(child.stderr.readline())["message"] == "up"
    child.send_signal(signal.SIGTERM)
    assert json.loads(child.communicate(timeout=CALL_SECONDS)[1])["message"] == "drained"
    assert child.returncode == 1


def test_the_stacks_of_a_blocked_service_are_logged_at_a_signal_and_it_goes_on() -> None:
    child = started(
        "import signal; from services.runtime.logs.records import print_stacks_at_signal; print_stacks_at_signal();"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]);"
        "print('up', flush=True); signal.sigwait([signal.SIGTERM]); sys.exit(3)"
    )
    assert child.stderr is not None
    read = child.stderr.readline
    assert json.loads(read())["message"] == "up"
    child.send_signal(signal.SIGUSR1)
    lines = iter(lambda: json.loads(read())["message"], '  File "<string>", line 1 in <module>')
    assert next(lines).startswith("Current thread ")
    assert all("sigwait" in line for line in lines)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=CALL_SECONDS)
    assert child.returncode == 3


def test_no_signal_is_lost_when_they_follow_each_other_closely() -> None:
    child = started(
        "import signal; signals = [signal.SIGUSR1, signal.SIGTERM]; signal.pthread_sigmask(signal.SIG_BLOCK, signals)\n"
        f"signal.alarm({CALL_SECONDS:.0f}); print('up', flush=True)\n"
        "for _ in range(10_000): print(int(signal.sigwait(signals)), flush=True)"
    )
    assert child.stderr is not None
    lines = (json.loads(line)["message"] for line in child.stderr)
    assert next(lines) == "up"
    for number in [signal.SIGUSR1, signal.SIGTERM] * 5_000:
        child.send_signal(number)
        assert next(lines) == str(int(number))
    child.communicate(timeout=CALL_SECONDS)


@pytest.mark.parametrize(
    ("line", "environment", "service"),
    [
        ("engine --model demo", {"QUIRE_ENGINE_LOG_FORMAT": "json"}, "engine"),
        ("gateway --log-format json", {}, "gateway"),
        ("kvmanager --log-format=text", {"QUIRE_KVMANAGER_LOG_FORMAT": "json"}, ""),
        ("engine", {"QUIRE_GATEWAY_LOG_FORMAT": "json"}, ""),
        ("health --log-format json", {}, ""),
        ("", {}, ""),
    ],
)
def test_only_a_service_with_a_json_log_is_relayed(line: str, environment: dict[str, str], service: str) -> None:
    assert service_with_json_log(line.split(), environment) == service
