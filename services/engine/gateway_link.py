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

    def push(self, output: engine_pb2.StepOutput) -> None:
        """Add the news of one step."""
        if self._backlog is None:
            self._backlog = output
        else:
            self._backlog.MergeFrom(output)
        self._filled.set()

    async def take(self) -> engine_pb2.StepOutput:
        """Wait for output and return all that waits. Raises BacklogTooLong when that is over the bound."""
        await self._filled.wait()
        self._filled.clear()
        output, self._backlog = self._backlog, None
        assert output is not None, "the event is set with the backlog"
        if output.ByteSize() > _LONGEST_BACKLOG_BYTES:
            raise BacklogTooLong(f"{output.ByteSize()} bytes of output were not read")
        return output
