"""Tries languages in a process that can be lost, before the engine compiles them itself.

Some schemas and patterns make llguidance take minutes, or more memory than there is, which would end the engine with
it. So each is first compiled in a process of its own, which may take only so much of either. It is forked from one
that waits with the tokenizer read, and which the engine starts when it needs it first.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from services.engine.guided.grammars import CompiledGrammar, GrammarSpec, InvalidGrammar, Vocabulary
from services.engine.guided.json_output import DEFAULT_BOUNDS, JsonBounds

_MOST_CPU_SECONDS = 2
_MOST_SECONDS = 10  # where the machine is busy
_MOST_BYTES = 96 * 1024 * 1024
_TOO_MUCH = "it takes too much time or memory to compile"


class CompileSandbox:
    """The process that waits. Belongs to one thread; another may `close` it."""

    def __init__(
        self, folder: Path, vocabulary_size: int, eos_token_ids: Iterable[int], bounds: JsonBounds = DEFAULT_BOUNDS
    ) -> None:
        """Remember the model; nothing is started yet."""
        self._model = [str(folder), str(vocabulary_size), json.dumps(asdict(bounds)), *map(str, sorted(eos_token_ids))]
        self._process: subprocess.Popen[str] | None = None

    def fault(self, language: GrammarSpec) -> str:
        """Return why a language must not be compiled, empty where nothing speaks against it. Raises OSError."""
        process = self._running()
        assert process.stdin is not None, "it was asked for"
        assert process.stdout is not None, "it was asked for"
        process.stdin.write(json.dumps(language) + "\n")
        process.stdin.flush()
        if not (answer := process.stdout.readline()):
            raise BrokenPipeError("the process that tries constraints has ended")
        return str(json.loads(answer))

    def close(self) -> None:
        """End the process; who waits for its answer gets an OSError."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has forked
            with suppress(BrokenPipeError), process:
                process.wait()

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._process = subprocess.Popen(  # noqa: S603 (our own module, and no part of a request)
                [sys.executable, "-m", __name__, *self._model],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # where a process that is lost says how
                text=True,
                start_new_session=True,  # Ctrl-C is meant for the engine, which ends this process too
            )
        return self._process


def main() -> None:
    """Answer one line of JSON, a language, with another, its fault, until the input ends."""
    folder, size, bounds, *ends = sys.argv[1:]
    vocabulary = Vocabulary(Path(folder), int(size), map(int, ends), JsonBounds(**json.loads(bounds)))
    for line in sys.stdin:
        fault = _fault_in_a_fork(vocabulary, GrammarSpec(*json.loads(line)))
        sys.stdout.write(json.dumps(fault) + "\n")
        sys.stdout.flush()


def _fault_in_a_fork(vocabulary: Vocabulary, language: GrammarSpec) -> str:
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        _bound()
        os.write(writable, json.dumps(_fault(vocabulary, language)).encode())
        os._exit(0)
    os.close(writable)
    with open(readable, encoding="ascii") as answer:  # noqa: PTH123 (a pipe has no path)
        said = answer.read()
    os.waitpid(child, 0)
    return str(json.loads(said)) if said else _TOO_MUCH


def _bound() -> None:
    """Let this process be ended when it takes too much."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most_bytes = pages * resource.getpagesize() + _MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_SECONDS, _MOST_CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(_MOST_SECONDS)


def _fault(vocabulary: Vocabulary, language: GrammarSpec) -> str:
    try:
        CompiledGrammar(vocabulary, language).try_out()
    except InvalidGrammar as error:
        return str(error)
    except BaseException:  # a panic of the library is one of those
        return _TOO_MUCH
    return ""


if __name__ == "__main__":
    main()
