"""Calls an engine as smg does."""

from collections.abc import Sequence
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as smg_pb

from tests.load import SLOW_SEED
from tests.running_quire import CALL_SECONDS

PROMPT = (20, 30, 40, 50, 60)


class SmgAnswer:
    """The messages of one generation: chunks and last messages by sample."""

    def __init__(self, responses: Sequence[smg_pb.GenerateResponse]) -> None:
        self.chunks = [one.chunk for one in responses if one.HasField("chunk")]
        self.completes = {one.complete.index: one.complete for one in responses if one.HasField("complete")}

    @property
    def complete(self) -> smg_pb.GenerateComplete:
        """The last message of the only sample."""
        assert list(self.completes) == [0]
        return self.completes[0]

    def streamed(self, sample: int = 0) -> list[int]:
        return [token for chunk in self.chunks if chunk.index == sample for token in chunk.token_ids]


class SmgClient:
    """Calls one engine; its calls have deadlines."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)

    def begin(self, request: smg_pb.GenerateRequest, timeout: float = CALL_SECONDS) -> Any:
        """Start a generation, and return its call, which yields messages."""
        return self.stub.Generate(request, timeout=timeout)

    def generate(self, name: str, *, stream: bool = False, **sampling: Any) -> SmgAnswer:
        return self.answer(request_of(name, stream=stream, **sampling))

    def answer(self, request: smg_pb.GenerateRequest) -> SmgAnswer:
        return SmgAnswer(list(self.begin(request)))


def request_of(
    name: str, prompt: Sequence[int] = PROMPT, *, stream: bool = False, slow: bool = False, **sampling: Any
) -> smg_pb.GenerateRequest:
    """Build a greedy request of 20 tokens; a slow one takes 20 ms a token."""
    defaults = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "seed": SLOW_SEED if slow else 0}
    return smg_pb.GenerateRequest(
        request_id=name,
        tokenized=smg_pb.TokenizedInput(input_ids=prompt),
        sampling_params=smg_pb.SamplingParams(**(defaults | sampling)),
        stream=stream,
    )
