"""The command `quire` in processes: help, generate, chat, health, explain, model."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import click
import click.testing
import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from quire.v1 import gateway_pb2
from services.cli.main import ANSWER_TOKENS, cli
from services.cli.options import unused_variables
from tests.load import SLOW_SEED, prompt_request
from tests.running_quire import START_SECONDS, RunningQuire
from tests.tiny_models import usual_size

QUIRE = (sys.executable, "-m", "services.cli.main")
ROOT = Path(__file__).parent.parent.parent.parent
PROMPT = "The quick brown fox"
LONG = 100
# Options of a request that runs slowly.
SLOW = ("--seed", str(SLOW_SEED))
COMMANDS = ["", *cli.commands]


def quire(*arguments: str, **keywords: object) -> "subprocess.CompletedProcess[str]":
    """Run the command to its end."""
    streams = {"capture_output": True, "text": True, "timeout": START_SECONDS}
    return subprocess.run([*QUIRE, *arguments], cwd=ROOT, check=False, **streams, **keywords)  # type: ignore[call-overload]


def begin(*arguments: str, **keywords: object) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([*QUIRE, *arguments], cwd=ROOT, **keywords)  # type: ignore[call-overload]


def request(max_tokens: int, prompt: str = PROMPT) -> gateway_pb2.GenerateRequest:
    return prompt_request(prompt, max_tokens, ignore_eos=False)


def chat_request(max_tokens: int, *turns: tuple[str, str]) -> gateway_pb2.GenerateRequest:
    chat = request(max_tokens)
    chat.prompt.chat.messages.extend(gateway_pb2.ChatMessage(role=role, content=text) for role, text in turns)
    return chat


def assert_fails_in_one_line(done: "subprocess.CompletedProcess[str]", reason: str) -> None:
    assert (done.returncode, done.stdout) == (1, "")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "variable", "warning"),
    [
        ("serve", "QUIRE_ENGINE_LOG_LEVEL", "QUIRE_ENGINE_LOG_LEVEL is ignored: `quire serve` reads QUIRE_SERVE_LOG"),
        ("serve", "QUIRE_ENGINE_WIEGHTS", "QUIRE_ENGINE_WIEGHTS is ignored: `quire engine` has no such option"),
        ("serve", "QUIRE_GATEWAY_MAX_REQUESTS", "`quire serve` reads QUIRE_SERVE_MAX_REQUESTS"),
        ("serve", "QUIRE_SERVE_WIEGHTS", "QUIRE_SERVE_WIEGHTS is ignored: `quire serve` has no such option"),
        ("serve", "QUIRE_ENGINE_LISTEN", "`quire serve` has no such option; run `quire engine` by itself"),
        ("serve", "QUIRE_KVMANAGER_LEASE_SECONDS", "`quire serve` has no such option; run `quire kvmanager` by itself"),
        ("plan", "QUIRE_PLAN_MODLE", "QUIRE_PLAN_MODLE is ignored: `quire plan` has no such option"),
        ("engine", "QUIRE_ENGINE_WIEGHTS", "QUIRE_ENGINE_WIEGHTS is ignored: `quire engine` has no such option"),
        ("gateway", "QUIRE_GATEWAY_ENGINE", "QUIRE_GATEWAY_ENGINE is ignored: `quire gateway` has no such option"),
        ("kvmanager", "QUIRE_KVMANAGER_LEASE", "QUIRE_KVMANAGER_LEASE is ignored: `quire kvmanager` has no"),
        ("run-batch", "QUIRE_ENGINE_LOG_LEVEL", "`quire run-batch` reads QUIRE_RUN_BATCH_LOG_LEVEL"),
        ("demo", "QUIRE_SERVE_WEIGHTS", "`quire demo` reads QUIRE_DEMO_WEIGHTS"),
    ],
)
def test_a_variable_that_a_command_ignores_is_named_at_its_start(command: str, variable: str, warning: str) -> None:
    others = {"run-batch": ("engine", "serve"), "demo": ("engine", "serve"), "plan": ("engine", "serve")}
    starts = ("engine", "gateway", "kvmanager") if command == "serve" else ()
    prefix = f"QUIRE_{command.replace('-', '_').upper()}"
    program = click.Context(cli, info_name="quire")
    context = click.Context(cli.commands[command], program, info_name=command, auto_envvar_prefix=prefix)
    read = f"{prefix}_MODEL" if command == "plan" else f"{prefix}_LOG_LEVEL"
    environment = {variable: "1", read: "info", "PATH": "/bin", "QUIRE_CPU_CLASS": "avx2"}
    (found,) = unused_variables(context, environment, others.get(command, ()), starts)
    assert warning in found


def test_a_warning_is_a_line_of_a_log_in_json() -> None:
    environment = {**os.environ, "QUIRE_ENGINE_LOG_LEVEL": "info"}
    done = quire("serve", "--log-format", "json", "--map-listen", "nowhere", env=environment)
    line = json.loads(done.stderr.splitlines()[0])
    assert (line["service"], line["level"]) == ("serve", "WARNING")
    assert line["message"] == "QUIRE_ENGINE_LOG_LEVEL is ignored: `quire serve` reads QUIRE_SERVE_LOG_LEVEL"


def test_serve_refuses_a_link_timeout_that_is_no_longer_than_the_time_between_heartbeats() -> None:
    done = quire("serve", "--heartbeat-seconds", "5", "--link-timeout-seconds", "5", env={**os.environ})
    assert done.returncode == 2
    assert "link_timeout_seconds must be more than heartbeat_seconds, 5, not 5" in done.stderr


def test_serve_warns_of_a_variable_of_the_engine_before_it_starts() -> None:
    done = quire("serve", "--map-listen", "nowhere", env={**os.environ, "QUIRE_ENGINE_LOG_LEVEL": "info"})
    assert done.returncode == 2
    assert done.stderr.startswith("serve     | WARNING QUIRE_ENGINE_LOG_LEVEL is ignored: `quire serve` reads")


@pytest.mark.parametrize("command", ["serve", "demo", "run-batch"])
def test_a_variable_of_the_engine_holds_where_a_command_starts_engines(command: str) -> None:
    def block_size(environment: dict[str, str]) -> int:
        with mock.patch.dict(os.environ, environment):
            name, required = command.replace("-", "_"), ["-i", "-", "-o", "answers"] * (command == "run-batch")
            with cli.commands[command].make_context(
                command, required, auto_envvar_prefix=f"QUIRE_{name.upper()}"
            ) as made:
                size: int = made.params["block_size"]
                return size

    own = f"QUIRE_{command.replace('-', '_').upper()}_BLOCK_SIZE"
    assert block_size({"QUIRE_ENGINE_BLOCK_SIZE": "32"}) == 32
    assert block_size({"QUIRE_ENGINE_BLOCK_SIZE": "32", own: "64"}) == 64


@pytest.fixture
def at(tiny_quire: RunningQuire) -> tuple[str, ...]:
    """The options for the address of the gateway and for greedy answers."""
    return ("--address", tiny_quire.addresses["gateway"], "--temperature", "0")


# Help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_describes_a_command_in_lines_that_fit(command: str) -> None:
    arguments = [command, "--help"] if command else ["--help"]
    shown = click.testing.CliRunner(env={"COLUMNS": "80"}).invoke(cli, arguments, prog_name="quire")
    assert shown.exit_code == 0
    lines = shown.output.splitlines()
    assert lines[0].startswith(f"Usage: quire {command}".rstrip())
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines[1:] if line.endswith("...")], "a summary is cut off"


@pytest.mark.parametrize("command", cli.commands)
def test_the_help_of_every_option_is_a_sentence(command: str) -> None:
    options = [parameter for parameter in cli.commands[command].params if isinstance(parameter, click.Option)]
    assert [option.name for option in options if not (option.help or "").endswith(".")] == []


def test_quire_without_a_command_shows_its_help_and_an_unknown_command_is_refused() -> None:
    alone, unknown = quire(), quire("server")
    assert "Start KV manager, engine and gateway" in alone.stdout + alone.stderr
    assert unknown.returncode == 2
    assert "No such command 'server'" in unknown.stderr


# generate


def tokens(count: int) -> tuple[str, ...]:
    """Return the options for exactly `count` tokens."""
    return ("--max-tokens", str(count), "--min-tokens", str(count))


def test_generate_streams_the_text(tiny_quire: RunningQuire, at: tuple[str, ...]) -> None:
    whole = request(LONG)
    whole.stopping.min_tokens = LONG
    expected = tiny_quire.generate(whole)
    tiny_quire.settled_pool()
    process = begin("generate", *at, *SLOW, *tokens(LONG), PROMPT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    with process, process.stdout, process.stderr:
        first = os.read(process.stdout.fileno(), 65536)
        assert tiny_quire.pool().sequences == 1
        rest, usage = process.stdout.read(), process.stderr.read().decode()
    assert process.returncode == 0
    assert (first + rest).decode().rstrip("\n") == expected.text.rstrip("\n")
    assert f"{expected.finished.usage.prompt_tokens} prompt tokens" in usage
    assert f"{LONG} generated" in usage
    assert usage.splitlines()[1:] == [f"stopped at {LONG} tokens; raise it with --max-tokens"]


def test_generate_reads_the_prompt_from_standard_input(tiny_quire: RunningQuire, at: tuple[str, ...]) -> None:
    prompt = "Größe: 北京\n🙂 and a second line\n"
    done = quire("generate", *at, "--max-tokens", "10", "-", input=prompt)
    assert done.returncode == 0
    assert done.stdout.rstrip("\n") == tiny_quire.generate(request(10, prompt)).text.rstrip("\n")


def test_generate_stops_at_its_default_limit_and_prints_it(tiny_quire: RunningQuire, at: tuple[str, ...]) -> None:
    done = quire("generate", *at, "--min-tokens", "200", PROMPT)
    expected = request(ANSWER_TOKENS)
    expected.stopping.min_tokens = 200
    assert done.stdout.splitlines() == tiny_quire.generate(expected).text.replace("\r", "\n").splitlines()
    assert f", {ANSWER_TOKENS} generated" in done.stderr
    assert done.stderr.splitlines()[1:] == [f"stopped at {ANSWER_TOKENS} tokens; raise it with --max-tokens"]
    more = quire("generate", *at, "--min-tokens", "300", "--max-tokens", "0", PROMPT)
    assert int(re.search(r", (\d+) generated", more.stderr)[1]) > 300
    assert more.stderr.count("\n") == 1


def test_a_prompt_too_long_for_the_default_limit_gets_as_many_tokens_as_fit(
    tiny_quire: RunningQuire, at: tuple[str, ...]
) -> None:
    prompt = "fox " * 800
    done = quire("generate", *at, "--min-tokens", "20", prompt)
    assert (done.returncode, "generated" in done.stderr) == (0, True)
    explicit = quire("generate", *at, "--max-tokens", str(ANSWER_TOKENS), prompt)
    assert_fails_in_one_line(explicit, f"stopping.max_tokens ({ANSWER_TOKENS}) take")


def test_explain_summarizes_the_request_whose_id_generate_prints(tiny_quire: RunningQuire, at: tuple[str, ...]) -> None:
    done = quire("generate", *at, "--max-tokens", "3", PROMPT)
    (name,) = re.findall(r", request (\w+)$", done.stderr, re.MULTILINE)
    tiny_quire.settled_pool()
    explained = quire("explain", name, "--address", tiny_quire.addresses["KV manager"])
    assert (explained.returncode, explained.stderr) == (0, "")
    assert "tokens were cached" in explained.stdout
    assert "It finished" in explained.stdout
    several = f"127.0.0.1:1,{tiny_quire.addresses['KV manager']}"
    assert quire("explain", name, "--address", several).stdout == explained.stdout
    # It may be the one with the request.
    assert_fails_in_one_line(quire("explain", "nobody", "--address", several), "127.0.0.1:1")


def test_generate_sends_its_options(tiny_quire: RunningQuire, at: tuple[str, ...]) -> None:
    sampling = {"temperature": 1, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "seed": 11}
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    expected = chat_request(30, ("system", "Be brief."), ("user", PROMPT))
    expected.MergeFrom(gateway_pb2.GenerateRequest(sampling=sampling, logit_rules=penalties))
    whole = tiny_quire.generate(expected)
    stop = whole.text[8:11]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (sampling | penalties).items()]
    limits = ("--max-tokens", "30", "--min-tokens", "2", "--stop", stop)
    done = quire("generate", *at[:2], "--system", "Be brief.", *flags, *limits, PROMPT)
    assert done.stdout.rstrip("\n") == whole.text[: whole.text.index(stop)].rstrip("\n")
    assert done.returncode == 0
    by_flag = quire("generate", *at, "--chat", "--max-tokens", "8", PROMPT)
    assert by_flag.stdout.rstrip("\n") == tiny_quire.generate(chat_request(8, ("user", PROMPT))).text.rstrip("\n")


def test_generate_follows_a_pattern_or_the_schema_of_a_file(at: tuple[str, ...], tmp_path: Path) -> None:
    assert quire("generate", *at, "--regex", "(red|blue) fox", PROMPT).stdout in ("red fox\n", "blue fox\n")
    (file := tmp_path / "schema.json").write_text('{"enum": ["red", "blue"]}')
    assert quire("generate", *at, "--json-schema", str(file), PROMPT).stdout in ('"red"\n', '"blue"\n')
    done = quire("generate", *at, "--json-schema", str(file), "--regex", "a", PROMPT)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--json-schema and --regex cannot be given together" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--address", "unix:/no/such/gateway.sock"), "unix:/no/such/gateway.sock: UNAVAILABLE: "),
        (("--min-tokens", "9", "--max-tokens", "5"), "INVALID_ARGUMENT: stopping.min_tokens must be at most "),
        (("--model", "gpt-9"), "NOT_FOUND: model must be one of 'tiny-llama', not 'gpt-9'"),
        (("--timeout", "0.001"), "DEADLINE_EXCEEDED: "),
    ],
)
def test_generate_reports_an_error_in_one_line(at: tuple[str, ...], arguments: tuple[str, ...], reason: str) -> None:
    assert_fails_in_one_line(quire("generate", *at, *arguments, PROMPT), reason)


def test_ctrl_c_ends_generate_and_its_request(tiny_quire: RunningQuire, at: tuple[str, ...]) -> None:
    process = begin("generate", *at, *SLOW, *tokens(900), PROMPT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 100)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=START_SECONDS)
    assert tiny_quire.settled_pool().sequences == 0
    assert (process.returncode, errors) == (130, b"")


# chat


def conversation(quire: RunningQuire) -> tuple[str, str]:
    """Return the answers to `Hello` and then to `And now?`."""
    first = quire.generate(chat_request(12, ("system", "Be brief."), ("user", "Hello"))).text
    history = (("system", "Be brief."), ("user", "Hello"), ("assistant", first), ("user", "And now?"))
    return first, quire.generate(chat_request(12, *history)).text


@usual_size
def test_chat_answers_line_by_line_with_the_history(tiny_quire: RunningQuire, at: tuple[str, ...]) -> None:
    first, second = conversation(tiny_quire)
    done = quire("chat", *at, "--system", "Be brief.", "--max-tokens", "12", input="Hello\nAnd now?\n\nnot sent\n")
    assert (done.returncode, done.stderr) == (0, "stopped at 12 tokens; raise it with --max-tokens\n" * 2)
    assert done.stdout.splitlines() == f"you> {first}\nyou> {second}\nyou> ".splitlines()


def test_chat_on_a_terminal_ends_with_ctrl_d(tiny_quire: RunningQuire, at: tuple[str, ...]) -> None:
    first, _ = conversation(tiny_quire)
    terminal, inner = pty.openpty()
    process = begin(
        *("chat", *at, "--system", "Be brief.", "--max-tokens", "12"), stdin=inner, stdout=inner, stderr=inner
    )
    os.close(inner)
    shown = read_until(terminal, lambda shown: shown.endswith("you> "))
    os.write(terminal, b"Hello\n")
    shown += read_until(terminal, lambda shown: shown.endswith("you> "))
    os.write(terminal, b"\x04")
    assert process.wait(timeout=START_SECONDS) == 0
    os.close(terminal)
    assert printable(first) in printable(shown)


def read_until(terminal: int, holds: Callable[[str], bool]) -> str:
    """Return a terminal's output once it fulfils a condition."""
    shown, deadline = b"", time.monotonic() + START_SECONDS
    waiting = select.poll()  # `select` refuses descriptors above 1,023
    waiting.register(terminal, select.POLLIN)
    while not holds(shown.decode(errors="replace")):
        assert waiting.poll(1000 * max(0.0, deadline - time.monotonic())), f"the output is {shown!r}"
        shown += os.read(terminal, 65536)
    return shown.decode(errors="replace")


def printable(text: str) -> str:
    """Remove line ends and control characters, which terminals change."""
    return "".join(character for character in text if character.isprintable())


# health and model


@pytest.mark.parametrize(
    ("service", "name", "status", "shown"),
    [
        ("gateway", None, 0, "SERVING"),
        ("gateway", "", 0, "SERVING"),
        ("engine", "quire.v1.Engine", 0, "SERVING"),
        ("engine", None, 1, "NOT_FOUND: unknown service 'quire.v1.Gateway': this is quire.v1.Engine"),
        ("nobody", None, 1, "UNAVAILABLE: "),
    ],
)
def test_health_prints_the_status_and_exits_with_it(
    tiny_quire: RunningQuire, service: str, name: str | None, status: int, shown: str
) -> None:
    address = tiny_quire.addresses.get(service, "127.0.0.1:9")
    at = (address,) if name is None else ("--address", address, "--service", name)
    done = quire("health", *at)
    assert done.returncode == status
    assert shown in (done.stderr if status else done.stdout)
    lines = (done.stdout + done.stderr).splitlines()
    if name == "" or status:
        assert len(lines) == 1
    else:
        assert re.fullmatch(r"tiny-llama: float32 on (amx|avx512-bf16|avx2|cpu)", "\n".join(lines[1:]))


def test_health_depends_on_the_status_alone() -> None:
    servicer = health.HealthServicer()
    servicer.set("quire.v1.Engine", health_pb2.HealthCheckResponse.SERVING)
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    done = quire("health", address, "--service", "quire.v1.Engine")  # it cannot describe its model
    server.stop(None).wait()
    assert (done.returncode, done.stdout, done.stderr) == (0, "SERVING\n", "")


def test_explain_reports_an_unknown_request_in_one_line(tiny_quire: RunningQuire) -> None:
    done = quire("explain", "nobody", "--address", tiny_quire.addresses["KV manager"])
    assert_fails_in_one_line(done, "NOT_FOUND")


def test_a_service_prints_its_stacks_at_a_signal_and_goes_on(tiny_quire: RunningQuire) -> None:
    before = len(tiny_quire.output.lines)
    os.kill(tiny_quire.children()["kvmanager"], signal.SIGUSR1)
    tiny_quire.output.wait_for("most recent call first", after=before)
    assert quire("health", tiny_quire.addresses["KV manager"], "--service", "quire.v1.KVManager").returncode == 0


def test_model_prints_only_the_folder(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("llama")
    done = quire("model", str(folder))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{folder}\n", "")
    assert_fails_in_one_line(quire("model", "/no/model"), "Error: /no/model is not a model: ")
