"""The compiled constraints of an engine: made when they are first asked for, off the event loop and the step path."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from engine.constraint import Constraint
from engine.errors import EngineUnavailable, FieldUnserved, InvalidRequest, QueueFull
from quire.v1 import decoding_pb2
from services.engine.guided.json_output import DEFAULT_BOUNDS, JsonBounds

if TYPE_CHECKING:  # an engine works without llguidance, except for requests with a constraint
    from services.engine.guided.compile_sandbox import CompileSandbox
    from services.engine.guided.grammars import Vocabulary

# What is kept takes some 100 kB each, and what a trial lets pass 96 MiB at the very most.
_MOST_KEPT = 32
_MOST_WAITING = 32

_Key = tuple[str, str]  # the kind of a constraint, and its text

log = logging.getLogger("quire.engine")


class _Compilation:
    """A constraint that is being compiled or was. Its outcome is the constraint, or what is wrong with it."""

    def __init__(self, outcome: "asyncio.Future[Constraint | str]") -> None:
        self.outcome = outcome
        self.waiting = 0


class Constraints:
    """Compiles one after the other, and keeps what was asked for last."""

    def __init__(
        self, folder: Path, vocabulary_size: int, eos_token_ids: Iterable[int], bounds: JsonBounds = DEFAULT_BOUNDS
    ) -> None:
        """Remember the model; `load` reads its tokenizer."""
        self._model = (folder, vocabulary_size, frozenset(eos_token_ids), bounds)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="constraints")
        self._kept: OrderedDict[_Key, _Compilation] = OrderedDict()
        self._tools: tuple[Vocabulary, CompileSandbox] | None = None
        self._unserved = ""

    async def load(self) -> None:
        """Read the tokenizer. Where that is not possible the log says why, and constraints are refused."""
        await asyncio.get_running_loop().run_in_executor(self._worker, self._load)

    async def compiled(self, wanted: decoding_pb2.OutputConstraint) -> Constraint:
        """Return a constraint, compiling it if need be. Raises a RequestRefused.

        Whoever waits can be cancelled; what nobody waits for any more is not begun.
        """
        key = _key(wanted)
        compilation = self._kept.get(key)
        if compilation is None or compilation.outcome.cancelled():
            compilation = self._begin(key)
        self._kept.move_to_end(key)
        compilation.waiting += 1
        try:
            outcome = await asyncio.shield(compilation.outcome)
        finally:
            compilation.waiting -= 1
            if not compilation.waiting:
                compilation.outcome.cancel()  # no matter if it is done
        if isinstance(outcome, str):
            raise InvalidRequest(f"constraint.{key[0]}: {outcome}", f"constraint.{key[0]}")
        return outcome

    def close(self) -> None:
        """Give up what is being compiled, and what waits to be."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        if self._tools:
            self._tools[1].close()

    def _begin(self, key: _Key) -> _Compilation:
        under_way = sum(not one.outcome.done() for one in self._kept.values())
        if under_way >= _MOST_WAITING:
            raise QueueFull(f"{under_way} constraints wait to be compiled already, which is the limit")
        try:
            outcome = asyncio.get_running_loop().run_in_executor(self._worker, self._compile, key)
        except RuntimeError as error:  # it is closed
            raise EngineUnavailable("the engine is shutting down") from error
        compilation = self._kept[key] = _Compilation(outcome)
        outcome.add_done_callback(lambda _: self._settle(key, compilation))
        return compilation

    def _settle(self, key: _Key, compilation: _Compilation) -> None:
        """Keep what came of a compilation, unless that says nothing of the constraint, and not too many of them."""
        outcome = compilation.outcome
        if (outcome.cancelled() or outcome.exception()) and self._kept.get(key) is compilation:
            del self._kept[key]
        done = [old for old, one in self._kept.items() if one.outcome.done()]
        for old in done[: max(0, len(done) - _MOST_KEPT)]:
            del self._kept[old]

    # On the worker's thread.

    def _load(self) -> None:
        try:
            from services.engine.guided.compile_sandbox import CompileSandbox
            from services.engine.guided.grammars import Vocabulary

            self._tools = Vocabulary(*self._model), CompileSandbox(*self._model)
        except Exception as error:  # neither `tokenizers` nor llguidance raise anything more precise
            self._unserved = f"{type(error).__name__}: {error}"
            log.warning("requests with a constraint are refused: %s", self._unserved)

    def _compile(self, key: _Key) -> Constraint | str:
        """Return a constraint or what is wrong with it. Raises a RequestRefused for what is not its fault."""
        if self._tools is None:
            raise FieldUnserved(f"constraint: this engine serves none ({self._unserved})", "constraint")
        from services.engine.guided.grammars import CompiledGrammar, GrammarSpec, InvalidGrammar

        vocabulary, trial = self._tools
        language = GrammarSpec(*key)
        try:
            return trial.fault(language) or CompiledGrammar(vocabulary, language)
        except InvalidGrammar as error:
            return str(error)
        except OSError as error:
            raise EngineUnavailable(f"the constraint could not be compiled: {error}") from error


def _key(wanted: decoding_pb2.OutputConstraint) -> _Key:
    match wanted.WhichOneof("kind"):
        case "json_schema":
            return ("json_schema", wanted.json_schema)
        case "regex":
            return ("regex", wanted.regex)
        case "json_object" if wanted.json_object:
            return ("json_object", "")
    raise InvalidRequest("constraint has no kind: give json_schema, regex or json_object", "constraint")
