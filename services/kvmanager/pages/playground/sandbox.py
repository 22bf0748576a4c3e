"""A sandbox: a pool operated by hand, with undo and a comparison to contiguous reservation."""

from collections.abc import Generator

from blocks import FreeReason
from services.kvmanager.pages.playground import operations as op
from services.kvmanager.pages.playground.beam import BeamExample
from services.kvmanager.pages.playground.contiguous import ContiguousMemory, Demand, policies
from services.kvmanager.pages.playground.sandbox_pool import BLOCKS, OperationRefused, SandboxLog, SandboxPool

_MAX_OPERATIONS = 400


class Sandbox:
    """A sandbox pool with its log, contiguous memories and operations. `block_size` is in tokens."""

    def __init__(self, block_size: int) -> None:
        self.log = SandboxLog()
        self.pool = SandboxPool(block_size, self.log)
        self.beam = BeamExample()
        self.words: dict[str, int] = {}
        self.done: list[op.Operation] = []
        sizes = policies(self.pool.longest)
        self.memories = {name: ContiguousMemory(BLOCKS * block_size, size_of) for name, size_of in sizes.items()}
        self._follow()

    def operate(self, operation: op.Operation) -> None:
        """Run an operation, or log its refusal."""
        if len(self.done) >= _MAX_OPERATIONS:
            self.log.say(
                f"The sandbox has reached its maximum of {_MAX_OPERATIONS} operations. Reset it to continue.",
                refused=True,
            )
            return
        try:
            self._do(operation)
        except OperationRefused as refused:
            self.log.say(f"Refused: {refused}.", refused=True)
        self.done.append(operation)  # even if refused, because a replay must use the same ids
        self.log.next_operation()
        self._follow()

    def undone(self) -> "Generator[None, None, Sandbox]":
        """Return, in slices, a new sandbox that has replayed all operations but the last, with the same ids."""
        replayed = Sandbox(self.pool.block_size)
        for operation in self.done[:-1]:
            replayed.operate(operation)
            yield
        return replayed

    def _do(self, operation: op.Operation) -> None:
        match operation:
            case op.NewOperation():
                self.pool.begin_sequence(self._tokens(operation), operation.final)
            case op.AppendOperation():
                self.pool.grow([operation.sequence], operation.tokens)
            case op.ForkOperation():
                self.pool.fork(operation.sequence)
            case op.WriteOperation():
                self.pool.write(operation.sequence)
            case op.FreeOperation():
                self.pool.free([operation.sequence], FreeReason.FINISHED)
            case op.BeamOperation():
                self.beam.next(self.pool)

    def _tokens(self, new: op.NewOperation) -> list[int]:
        words = new.text.split()
        if bool(words) == (new.tokens is not None):
            raise OperationRefused("give either a number of tokens or a text")
        for word in words:
            if word not in self.words:
                (self.words[word],) = self.pool.new_tokens(1)
        return [self.words[word] for word in words] or self.pool.new_tokens(new.tokens or 0)

    def _follow(self) -> None:
        demands = [Demand(number, len(one.token_ids), one.final) for number, one in self.pool.texts.items()]
        self.slots = {name: memory.follow(demands) for name, memory in self.memories.items()}
