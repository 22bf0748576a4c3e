"""An engine's link to one gateway: outputs wait here, merged, until the stream takes them."""

import asyncio

from quire.v1 import engine_pb2

_LONGEST_BACKLOG_BYTES = 8 * 1024 * 1024


class BacklogTooLong(Exception):
    """The gateway does not read: more output waits for it than the bound."""


class GatewayLink:
    """Outputs of one stream. Lives on the event loop; one message per step, or one for all steps while it is behind."""

    def __init__(self) -> None:
        self._backlog: engine_pb2.StepOutput | None = None
        self._filled = asyncio.Event()
        self._closing = False

    @property
    def closed(self) -> bool:
        """Whether it was closed, and all that was pushed before is taken."""
        return self._closing and self._backlog is None

    def push(self, output: engine_pb2.StepOutput) -> None:
        """Add the news of one step."""
        if self._backlog is None:
            self._backlog = output
        else:
            self._backlog.MergeFrom(output)
        self._filled.set()

    def nudge(self) -> None:
        """Let the stream say at once what it says with every message."""
        self._filled.set()

    def close(self) -> None:
        """Let the stream end when it has sent what waits."""
        self._closing = True
        self._filled.set()

    async def take(self) -> engine_pb2.StepOutput | None:
        """Wait for output and return all that waits; None when nudged or closed without any.

        Raises BacklogTooLong when that is over the bound.
        """
        await self._filled.wait()
        self._filled.clear()
        output, self._backlog = self._backlog, None
        if output is not None and output.ByteSize() > _LONGEST_BACKLOG_BYTES:
            raise BacklogTooLong(f"{output.ByteSize()} bytes of output were not read")
        return output
