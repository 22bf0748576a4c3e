"""Every command of README.md and docs/ works as written: it is run, or parsed by its program.

Examples in Python are run as well.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
import grpc
import pytest
import yaml

from bench.__main__ import module_of
from quire.v1 import gateway_pb2_grpc
from services.cli.main import cli
from tests.documented_commands import PAGES, PROGRAMS, ROOT, Command, commands, unlabelled_commands
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, EXACT, START_SECONDS, STOP_SECONDS, Answer, Output

COMMANDS = commands()
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
COMPOSE_OPTIONS = {
    "up": {"--build", "--detach", "--wait", "--no-deps", "--no-recreate", "--scale"},
    "down": set[str](),
    "build": set[str](),
    "exec": set[str](),
    "run": {"--rm"},
    "cp": set[str](),
    "rm": {"--force"},
    "restart": set[str](),
    "port": {"--index"},
    "logs": {"--no-log-prefix", "--tail"},
    "ps": {"--all"},
    "kill": {"--signal"},
}
# Documented commands that run against the README's `make serve`, and their output.
RUN = {
    "quire generate": "request ",
    "quire explain": "It finished",
    "quire key": "key",
    "quire pin": "support: ",
    "quire pins": "support: ",
    "quire unpin": "no prefix is pinned",
    "quire reset-cache": "no prefix is pinned",
    "curl": "data: [DONE]",
}
# Documented commands that are only parsed: they take long, or need a key, another machine or a model.
READ = {
    "make demo": "tests/acceptance/test_newcomer.py runs it",
    "make serve": "`serving` runs it, without arguments",
    "make test": "this is it",
    "pytest": "this is it",
    "make simulate": "tests/simulation run it",
    "make gpu-check": "tests/gpu_check run it",
    "make gpu-first": "tests/gpu_check run it",
    "build/wheels": "they need a package index",
    "build/dry-wheels": "they need a package index",
    "git archive": "its archive is for a GPU machine",
    "/tmp/carried": "on a GPU machine",
    "tar -xf": "on a GPU machine",
    "quire serve": "`make serve` runs it",
    "quire bench": "tests/services/loadgen run it, for as long as a test may",
    "quire replay": "tests/services/cli/commands run it on records",
    "quire plan": "its model has to be fetched",
    "quire run-batch": "tests/services/cli run it",
    "quire engine": "tests/services start it",
    "quire kvmanager": "tests/services start it",
    "HF_ENDPOINT": "tests/acceptance/test_smg.py runs smg",
    "vllm-router": "tests/acceptance/test_kv_aware_router.py runs it",
    "sglang_router": "tests/acceptance/test_routers.py runs it",
    "quire kv-events": "tests/services/cli/test_kv_events.py runs it",
    "pip install": "needs a package index",
    "protos/compatibility.py": "tests/protos run it",
    "deploy.prometheus": "tests/deployment/test_alerts.py runs it",
    "QUIRE_API_KEY": "the key is made up",
    "shmem_enabled": "changes the whole machine",
    "pgrep": "finds the process that the next command kills",
    "kill": "tests/services/faults/test_failover.py kills engines",
    "acme/cmpl-7": "a tenant's request",
    "docker compose": "make compose-check runs it",
    "helm install": "make helm-check renders it",
    "helm test": "needs a cluster",
    "helm upgrade": "needs a cluster",
    "helm history": "needs a cluster",
    "helm rollback": "needs a cluster",
    "kubectl port-forward": "needs a cluster",
    "kubectl rollout": "needs a cluster",
    "amtool": "needs an Alertmanager",
    "git checkout": "of a release",
    "make image": "make compose-check builds it",
    "docker push": "needs a registry",
}


def kind(command: Command) -> str:
    """Return the entry of RUN or READ for a shown command; empty without one."""
    head = " ".join(command.words[:2])
    for name in READ:
        if head == name or name in command.text.split("=")[0] or (name in command.text and "/" in name):
            return name
    return next((name for name in RUN if head == name or command.words[0] == name), "")


def test_documented_commands_are_in_shell_blocks() -> None:
    assert unlabelled_commands() == []


def test_every_documented_command_is_run_or_parsed() -> None:
    missing = [str(command) for command in COMMANDS if command.shown and not kind(command)]
    assert missing == [], "add it to RUN, or to READ with the reason"
    used = {kind(command) for command in COMMANDS if command.shown}
    assert used == RUN.keys() | READ.keys(), "remove entries that no page shows"


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.words[0] in PROGRAMS], ids=str)
def test_a_documented_command_is_parsed_by_its_program(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program, *words = takewhile(lambda word: word not in ("...", ">>"), command.words)
    readers: dict[str, Callable[[list[str], bool], None]] = {
        "quire": read_quire,
        "make": read_make,
        "docker": read_docker,
        "helm": read_helm,
        "kubectl": read_kubectl,
        "pip": read_pip,
    }
    readers[program](words, command.shown)


def read_quire(words: list[str], shown: bool) -> None:
    """Parse it without running it. In a sentence, arguments and files may be missing."""
    command: click.Command = cli
    context = click.Context(cli, info_name="quire")
    while isinstance(command, click.Group) and words:
        assert words[0] in command.commands, f"there is no command {words[0]}"
        command = command.commands[words[0]]
        words = words[1:]
    for name in re.findall(r"\S+\.(?:txt|jsonl|record)", " ".join(words)) if shown else ():
        Path(name).write_text("{}")
    try:
        with command.make_context(command.name, words, parent=context):
            pass
    except click.exceptions.Exit:  # of --help
        pass
    except (click.BadParameter, click.BadOptionUsage, click.exceptions.NoArgsIsHelpError) as error:
        absent = isinstance(error, click.MissingParameter | click.exceptions.NoArgsIsHelpError)
        if shown or not (absent or re.search(r"requires an argument|No such file|does not exist", error.message)):
            raise


def read_make(words: list[str], _shown: bool) -> None:
    for target in (word for word in words if word.startswith("bench-")):
        assert module_of(target.removeprefix("bench-").replace("NAME", "kv"))
    done = subprocess.run(
        ["make", "-n", "-o", ".venv/installed", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def read_docker(words: list[str], _shown: bool) -> None:
    if words[0] != "compose":
        assert words[0] in ("stop", "build", "push", "events", "ps", "kill", "start")
        return
    name, *rest = words[1:]
    options = {word.split("=")[0] for word in rest if word.startswith("--")}
    if name == "exec":
        service, program, *arguments = rest
        assert service in COMPOSE["services"]
        assert program == "quire"
        read_quire(arguments, shown=False)
        return
    if name == "run":
        options = options & {"--rm"}
    assert options <= COMPOSE_OPTIONS[name]
    if name == "up" and "--no-deps" not in options:
        assert "--wait" in options, "later commands need an engine"
    named = {word.split(":")[0] for word in rest if re.fullmatch(r"[a-z-]+(:/\S+)?", word) and not word.startswith("-")}
    assert named & COMPOSE["services"].keys() == named - {"renew"}


def read_helm(words: list[str], _shown: bool) -> None:
    assert words[0] in ("install", "test", "upgrade", "history", "rollback")
    if words[0] in ("install", "upgrade") and not words[2].startswith("oci://"):  # another project's chart
        assert (ROOT / words[2] / "Chart.yaml").exists()
    files = [words[at + 1] for at, word in enumerate(words) if word == "-f"]
    assert [file for file in files if file != "mine.yaml" and not (ROOT / file).exists()] == []


def read_kubectl(words: list[str], _shown: bool) -> None:
    """Check that its objects are in the rendered chart of a release called blue."""
    assert words[0] in ("port-forward", "rollout", "get", "describe", "logs", "exec")
    if words[0] == "rollout" and words[1:]:
        words = words[1:]
        assert words[0] in ("pause", "resume", "restart", "status", "undo")
    golden = (ROOT / "tests" / "deployment" / "helm" / "golden" / "default.yaml").read_text()
    objects = [one for one in yaml.safe_load_all(golden) if one]
    for named in (word for word in words[1:] if "/" in word):
        made, name = named.replace("RELEASE-", "").replace("quire-", "blue-quire-").split("/")
        (found,) = [one for one in objects if (one["kind"].lower(), one["metadata"]["name"]) == (made, name)]
        if made == "service":
            assert {port["port"] for port in found["spec"]["ports"]} >= {int(word) for word in words[2:]}


def read_pip(words: list[str], _shown: bool) -> None:
    assert words[0] == "install"
    if "--index-url" in words:
        assert words[1] == "torch"
        return
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extra = re.fullmatch(r"quire\[(\w+)\]", words[1])
    if extra:
        assert extra[1] in extras
    else:  # a client of another project, which the tests install too
        packages = {re.split(r"[<>=~\[]", one)[0] for listed in extras.values() for one in listed}
        assert set(words[1:]) <= packages


# Running commands.


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source, and an installed environment for `make`."""
    folder = tmp_path_factory.mktemp("clone") / "quire"
    generated = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "build", "*.egg-info", "results", "images")
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*generated))
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name in ("quire", "python"):
        script = folder / ".venv" / "bin" / name
        module = "-m services.cli.main " if name == "quire" else ""
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
        script.chmod(0o755)
    (folder / ".venv" / "installed").touch()  # else `make` installs what services need
    (folder / "system_prompt.txt").write_text("You are a fox.")
    return folder


Shell = Callable[[str], "subprocess.Popen[str]"]


def python_examples() -> list[Any]:
    found = [(page, code) for page in PAGES for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]
    return [pytest.param(code, id=f"{page.name}: {code.splitlines()[0]}") for page, code in found]


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


@pytest.fixture(scope="module")
def shell(clone: Path, tiny_model: Callable[[str], Path]) -> Shell:
    """Starts commands in the clone, with a newcomer's environment and unused ports."""
    grpc_port, http_port = free_ports(2)
    (clone / "home").mkdir()
    environment = {
        "HOME": str(clone / "home"),
        "PATH": f"{clone}/.venv/bin:{os.environ['PATH']}",
        "PYTHONPATH": f"{clone}:{clone}/protos",
        "QUIRE_RUNTIME": str(clone / "home" / "runtime"),
        "QUIRE_SERVE_MODEL": str(tiny_model("llama")),
        "QUIRE_SERVE_LISTEN": f"127.0.0.1:{grpc_port}",
        "QUIRE_SERVE_HTTP_LISTEN": f"127.0.0.1:{http_port}",
        "QUIRE_SERVE_MAP_LISTEN": "127.0.0.1:0",
        "QUIRE_SERVE_METRICS_LISTEN": "127.0.0.1:0",
        "QUIRE_SERVE_DEVICE_BLOCKS": "256",
        "QUIRE_SERVE_ATTENTION_BACKEND": "torch",  # the others are compiled first
        **EXACT,
    }

    def begin(text: str) -> "subprocess.Popen[str]":
        here = text.replace("127.0.0.1:8000", f"127.0.0.1:{http_port}").replace(
            "127.0.0.1:50051", f"127.0.0.1:{grpc_port}"
        )
        return subprocess.Popen(
            ["bash", "-c", here],
            cwd=clone,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    return begin


@pytest.fixture(scope="module")
def serving(shell: Shell) -> Iterator[Output]:
    """The output of `make serve` after the requests that the pages explain."""
    process = shell("make -o .venv/installed serve")
    output = Output(process)
    line = output.wait_for("serve     | ready: gateway at ", START_SECONDS)
    address = line.split("gateway at ")[1].split(",")[0]
    with grpc.insecure_channel(address) as channel:
        for request_id in ("r9", "chatcmpl-first"):
            (request := prompt_request("fox", 3)).request_id = request_id
            Answer.of(gateway_pb2_grpc.GatewayStub(channel).Generate(request, timeout=CALL_SECONDS))
    yield output
    os.killpg(process.pid, signal.SIGINT)
    process.wait(STOP_SECONDS)
    output.finish()
    assert [line for line in output.lines if "Traceback" in line] == []


def printed_by(shell: Shell, text: str) -> str:
    process = shell(text)
    printed, _ = process.communicate(timeout=CALL_SECONDS)
    assert process.returncode == 0, printed
    return printed


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.shown and kind(one) in RUN], ids=str)
def test_a_documented_command_runs(serving: Output, shell: Shell, command: Command) -> None:
    assert RUN[kind(command)] in printed_by(shell, command.text)


@pytest.mark.parametrize("code", python_examples())
def test_a_python_example_prints_an_answer(serving: Output, shell: Shell, code: str) -> None:
    before = len(serving.lines)
    printed = printed_by(shell, f".venv/bin/python - <<'END'\n{code}\nEND\n")
    ended = serving.wait_for("status=OK", after=before)
    assert printed.strip() or "finish_reason=stop" in ended, "a random model may end its text at once"


@pytest.mark.parametrize("command", [".venv/bin/quire chat", ".venv/bin/quire health", "quire instances"])
def test_a_command_of_a_sentence_works_as_it_is(serving: Output, shell: Shell, command: str) -> None:
    printed_by(shell, command)
