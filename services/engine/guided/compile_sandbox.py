"""Compiles grammars in a disposable process before the engine compiles them.

Some schemas and patterns make llguidance take minutes, or more memory than there is, which would end the engine. So
each grammar is first compiled in a process with limits on both. It is forked from a process that has already read the
tokenizer; the engine starts that one for its first grammar.
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

from services.engine.guided.grammar_sources import GrammarSpec, InvalidGrammar
from services.engine.guided.grammars import CompiledGrammar, Vocabulary
from services.engine.guided.json_output import DEFAULT_BOUNDS, JsonBounds
from services.runtime.child_process import python_command

_MAX_CPU_SECONDS = 2
_MAX_SECONDS = 10  # on a busy machine
_MAX_BYTES = 96 * 1024 * 1024
_TOO_EXPENSIVE = "it takes too much time or memory to compile"


class CompileSandbox:
    """The process that forks compilations. Belongs to one thread; another one may `close` it."""

    def __init__(
        self, folder: Path, vocabulary_size: int, eos_token_ids: Iterable[int], bounds: JsonBounds = DEFAULT_BOUNDS
    ) -> None:
        """Store the model's parameters; the process starts with the first grammar."""
        self._model = [str(folder), str(vocabulary_size), json.dumps(asdict(bounds)), *map(str, sorted(eos_token_ids))]
        self._process: subprocess.Popen[str] | None = None

    def fault(self, spec: GrammarSpec) -> str:
        """Return the reason not to compile a grammar, empty if there is none. Raises OSError if the process ends."""
        process = self._running()
        assert process.stdin is not None, "opened as a pipe"
        assert process.stdout is not None, "opened as a pipe"
        process.stdin.write(json.dumps(spec) + "\n")
        process.stdin.flush()
        if not (answer := process.stdout.readline()):
            raise BrokenPipeError("the process that compiles constraints has ended")
        return str(json.loads(answer))

    def close(self) -> None:
        """End the process; a pending call raises OSError."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # including its fork
            with suppress(BrokenPipeError), process:
                process.wait()

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._process = subprocess.Popen(  # noqa: S603 (this module, without parts of a request)
                python_command("-m", __name__, *self._model),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # llguidance prints its panics there
                text=True,
                start_new_session=True,  # Ctrl-C is for the engine, which ends this process itself
            )
        return self._process


def main() -> None:
    """Read one grammar per line, as JSON, and answer each with its fault, until the input ends."""
    folder, size, bounds, *ends = sys.argv[1:]
    vocabulary = Vocabulary(Path(folder), int(size), map(int, ends), JsonBounds(**json.loads(bounds)))
    for line in sys.stdin:
        fault = _fault_in_a_fork(vocabulary, GrammarSpec(*json.loads(line)))
        sys.stdout.write(json.dumps(fault) + "\n")
        sys.stdout.flush()


def _fault_in_a_fork(vocabulary: Vocabulary, spec: GrammarSpec) -> str:
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        _bound()
        os.write(writable, json.dumps(_fault(vocabulary, spec)).encode())
        os._exit(0)
    os.close(writable)
    with open(readable, encoding="ascii") as answer:  # noqa: PTH123 (a pipe has no path)
        output = answer.read()
    os.waitpid(child, 0)
    return str(json.loads(output)) if output else _TOO_EXPENSIVE


def _bound() -> None:
    """Limit the CPU time, memory and real time of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most_bytes = pages * resource.getpagesize() + _MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_SECONDS, _MAX_CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(_MAX_SECONDS)


def _fault(vocabulary: Vocabulary, spec: GrammarSpec) -> str:
    try:
        CompiledGrammar(vocabulary, spec).probe()
    except InvalidGrammar as error:
        return str(error)
    except BaseException:  # includes panics of the library
        return _TOO_EXPENSIVE
    return ""


if __name__ == "__main__":
    main()
