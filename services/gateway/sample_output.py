"""The output of one sample: its tokens, its text, and its finish reason."""

from dataclasses import dataclass, field

from quire.v1 import decoding_pb2, engine_pb2, gateway_pb2
from services.gateway.text.text_stream import TextStream


@dataclass
class SampleOutput:
    """`include_stop`: the text includes the stop string or stop token."""

    text: TextStream
    include_stop: bool
    token_ids: list[int] = field(default_factory=list)
    end: engine_pb2.SampleEnd | None = None
    stop: str | None = None  # the stop string that ended it

    @property
    def ended(self) -> bool:
        """Whether the sample is complete."""
        return self.end is not None or self.stop is not None

    def add(self, token_ids: list[int], end: engine_pb2.SampleEnd | None) -> tuple[list[int], str]:
        """Add tokens from an engine; return those before the stop string, and the new text."""
        self.token_ids += token_ids
        piece = self.text.push(self._visible(token_ids, end))
        text, self.stop = piece.text, piece.stop
        if self.stop is not None:
            token_ids = token_ids[: piece.token_count]
        elif end is not None:
            rest = self.text.finish()
            text, self.stop = text + rest.text, rest.stop
        self.end = end
        return token_ids, text

    def add_inner(self, token_ids: list[int]) -> str:
        """Add tokens that are not the last, without stop strings; return the new text."""
        self.token_ids += token_ids
        return self.text.push_inner(token_ids)

    def state(self) -> engine_pb2.SampleState:
        """Return the state from which another engine can resume."""
        return engine_pb2.SampleState(generated_token_ids=self.token_ids, ended=self.ended)

    def finish(self, reported: engine_pb2.SampleEnd) -> gateway_pb2.SampleFinish:
        """Return the finish reason; `reported` is the sample's end in RequestFinished."""
        if self.stop is not None:
            return gateway_pb2.SampleFinish(reason=decoding_pb2.FINISH_REASON_STOP, stop_string=self.stop)
        end = self.end or reported
        finish = gateway_pb2.SampleFinish(reason=end.reason, score=end.score if end.HasField("score") else None)
        if end.HasField("stop_token_id"):
            finish.stop_token_id = end.stop_token_id
        return finish

    def _visible(self, token_ids: list[int], end: engine_pb2.SampleEnd | None) -> list[int]:
        """Drop the stop token, unless the text must include it."""
        hidden = end is not None and end.HasField("stop_token_id") and not self.include_stop
        return token_ids[:-1] if hidden else token_ids
