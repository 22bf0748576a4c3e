"""The engine's compiled constraints: compiled at first use, off the event loop and the step path."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.constraint import Constraint
from engine.errors import ConstraintFailed, EngineUnavailable, InvalidRequest, QueueFull, UnsupportedField
from engine.native.kernels import return_freed_memory
from quire.v1 import decoding_pb2, engine_pb2
from services.engine.guided.json_output import DEFAULT_BOUNDS, JsonBounds
from services.engine.guided.tool_calls import source_of, tools_of

if TYPE_CHECKING:  # llguidance is needed only for requests with a constraint
    from services.engine.guided.compile_sandbox import CompileSandbox
    from services.engine.guided.grammars import CompiledGrammar, Vocabulary
    from services.engine.guided.mark_tokens import MarkTokens

# A compiled constraint takes some 100 kB; the sandbox passes at most 96 MiB.
_MAX_CACHED = 32
_MAX_WAITING = 32

_Key = tuple[str, str]  # kind of a constraint, and its text

log = logging.getLogger("quire.engine")


class CompiledConstraint(Constraint, Protocol):
    """A constraint, and what was left out of a client's schemas because it cannot be followed."""

    @property
    def omitted(self) -> tuple[str, ...]:
        """A sentence for each part, with its place."""

    @property
    def is_exhausted(self) -> bool:
        """Whether an output has exceeded a limit that all outputs share."""


class _Compilation:
    """A pending or completed compilation. Its outcome is the constraint, or the fault of its grammar."""

    def __init__(self, outcome: "asyncio.Future[CompiledConstraint | str]") -> None:
        self.outcome = outcome
        self.waiting = 0

    @property
    def is_unusable(self) -> bool:
        """Whether it must be done again: nobody waited for it, or an output has exhausted the grammar."""
        outcome = self.outcome
        if not outcome.done() or outcome.cancelled() or outcome.exception():
            return outcome.cancelled()
        return not isinstance(found := outcome.result(), str) and found.is_exhausted


class Constraints:
    """Compiles one constraint at a time, and caches the most recently used."""

    def __init__(
        self, folder: Path, vocabulary_size: int, eos_token_ids: Iterable[int], bounds: JsonBounds = DEFAULT_BOUNDS
    ) -> None:
        """Store the model's parameters; `load` reads its tokenizer."""
        self._model = (folder, vocabulary_size, frozenset(eos_token_ids), bounds)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="constraints")
        self._cache: OrderedDict[_Key, _Compilation] = OrderedDict()
        self._compilers: tuple[Vocabulary, CompileSandbox] | None = None
        self._mark_tokens: MarkTokens | None = None
        self._unsupported_reason = ""

    async def load(self) -> None:
        """Read the tokenizer. If that fails, log the reason; constraints are refused then."""
        await asyncio.get_running_loop().run_in_executor(self._worker, self._load)

    async def of_request(self, submission: engine_pb2.Submission) -> CompiledConstraint:
        """Return the constraint of a request, which begins behind its thought. Raises RequestRefused."""
        answer = await self.compiled(submission.constraint) if submission.HasField("constraint") else None
        if answer is not None and not submission.HasField("thought"):
            return answer
        behind = partial(self._behind_thought, submission.thought, answer)
        return await asyncio.get_running_loop().run_in_executor(self._worker, behind)

    async def compiled(self, constraint: decoding_pb2.OutputConstraint) -> CompiledConstraint:
        """Return a constraint, compiling it if necessary. Raises RequestRefused.

        The call can be cancelled; a compilation that no call waits for does not start.
        """
        key = _key(constraint)
        compilation = self._cache.get(key)
        if compilation is None or compilation.is_unusable:
            compilation = self._begin(key)
        self._cache.move_to_end(key)
        compilation.waiting += 1
        try:
            outcome = await asyncio.shield(compilation.outcome)
        finally:
            compilation.waiting -= 1
            if not compilation.waiting:
                compilation.outcome.cancel()  # no effect if it is done
        if isinstance(outcome, str):
            raise InvalidRequest(f"constraint.{key[0]}: {outcome}", f"constraint.{key[0]}")
        return outcome

    def close(self) -> None:
        """Cancel pending compilations."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        if self._compilers:
            self._compilers[1].close()

    def _begin(self, key: _Key) -> _Compilation:
        pending = sum(not one.outcome.done() for one in self._cache.values())
        if pending >= _MAX_WAITING:
            raise QueueFull(f"{pending} constraints are being compiled, which is the limit")
        try:
            outcome = asyncio.get_running_loop().run_in_executor(self._worker, self._compile, key)
        except RuntimeError as error:  # the executor is shut down
            raise EngineUnavailable("the engine is shutting down") from error
        compilation = self._cache[key] = _Compilation(outcome)
        outcome.add_done_callback(lambda _: self._on_done(key, compilation))
        return compilation

    def _on_done(self, key: _Key, compilation: _Compilation) -> None:
        """Keep the outcome of a compilation, unless it failed for another reason than its grammar; evict the oldest."""
        outcome = compilation.outcome
        if (outcome.cancelled() or outcome.exception()) and self._cache.get(key) is compilation:
            del self._cache[key]
        done = [old for old, one in self._cache.items() if one.outcome.done()]
        for old in done[: max(0, len(done) - _MAX_CACHED)]:
            del self._cache[old]

    # On the worker's thread.

    def _load(self) -> None:
        try:
            from services.engine.guided.compile_sandbox import CompileSandbox
            from services.engine.guided.grammars import Vocabulary

            self._compilers = Vocabulary(*self._model), CompileSandbox(*self._model)
            return_freed_memory()
        except Exception as error:  # `tokenizers` and llguidance raise nothing more precise
            self._unsupported_reason = f"{type(error).__name__}: {error}"
            log.warning("requests with a constraint are refused: %s", self._unsupported_reason)

    def _behind_thought(self, thought: decoding_pb2.Thought, answer: CompiledConstraint | None) -> CompiledConstraint:
        """Return a constraint that begins behind a thought. Raises RequestRefused."""
        from services.engine.guided.thoughts import ThoughtConstraint

        return ThoughtConstraint(self._tokens_of_marks(), thought, answer)

    def _tokens_of_marks(self) -> "MarkTokens":
        vocabulary, _ = self._supported
        from services.engine.guided.mark_tokens import MarkTokens

        if self._mark_tokens is None:
            self._mark_tokens = MarkTokens(vocabulary)
        return self._mark_tokens

    def _in_text(self, source: str, calls: "CompiledGrammar") -> CompiledConstraint:
        """Return a grammar of calls that may stand in text, or the grammar itself."""
        tools = tools_of(source)
        if not tools.mark:
            return calls
        from services.engine.guided.free_text import CallsOrTextConstraint, FreeTextConstraint

        if tools.only_at_start:
            return CallsOrTextConstraint(self._tokens_of_marks(), tools.beginnings, calls)
        return FreeTextConstraint(self._tokens_of_marks(), tools.mark, calls)

    @property
    def _supported(self) -> "tuple[Vocabulary, CompileSandbox]":
        """What compiles. Raises UnsupportedField."""
        if self._compilers is None:
            raise UnsupportedField(
                f"constraint is not supported with the model's tokenizer ({self._unsupported_reason})", "constraint"
            )
        return self._compilers

    def _compile(self, key: _Key) -> CompiledConstraint | str:
        """Return a constraint, or the fault of its grammar. Raises RequestRefused for other failures."""
        vocabulary, sandbox = self._supported
        from services.engine.guided.grammar_sources import GrammarSpec, InvalidGrammar
        from services.engine.guided.grammars import CompiledGrammar

        spec = GrammarSpec(*key)
        try:
            if fault := sandbox.fault(spec):
                return fault
            compiled = CompiledGrammar(vocabulary, spec)
            return self._in_text(spec.text, compiled) if spec.kind == "tool_calls" else compiled
        except InvalidGrammar as error:
            return str(error)
        except ConstraintFailed:  # of a mark, by its other spelling in tokens
            return "mark is not how calls begin"
        except OSError as error:
            raise EngineUnavailable(f"the constraint could not be compiled: {error}") from error


def _key(constraint: decoding_pb2.OutputConstraint) -> _Key:
    match constraint.WhichOneof("kind"):
        case "json_schema":
            return ("json_schema", constraint.json_schema)
        case "regex":
            return ("regex", constraint.regex)
        case "json_object" if constraint.json_object:
            return ("json_object", "")
        case "tool_calls":
            return ("tool_calls", source_of(constraint.tool_calls))
    raise InvalidRequest("constraint must have one of json_schema, regex, json_object or tool_calls", "constraint")
