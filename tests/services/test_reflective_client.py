"""A client without generated code, which reads methods and messages from the gateway's reflection."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.load import SLOW_SEED
from tests.running_quire import CALL_SECONDS, RunningQuire, open_channel


class Reflective:
    """Calls methods by name; requests and responses are dicts, as in JSON."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._database = ProtoReflectionDescriptorDatabase(channel)
        self._pool = DescriptorPool(self._database)

    def services(self) -> list[str]:
        return list(self._database.get_services())

    def call(self, service: str, method: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the responses: one, if the method does not stream."""
        described = self._pool.FindServiceByName(service).methods_by_name[method]
        message = ParseDict(request, GetMessageClass(described.input_type)())
        open_call: Callable[..., Any] = (
            self._channel.unary_stream if described.server_streaming else self._channel.unary_unary
        )
        method_call = open_call(
            f"/{service}/{method}",
            request_serializer=lambda one: one.SerializeToString(),
            response_deserializer=GetMessageClass(described.output_type).FromString,
        )
        answered = method_call(message, timeout=CALL_SECONDS)
        for response in answered if described.server_streaming else [answered]:
            yield MessageToDict(response)


@pytest.fixture
def client(tiny_quire: RunningQuire) -> Iterator[Reflective]:
    with open_channel(tiny_quire.addresses["gateway"]) as channel:
        yield Reflective(channel)


def test_generate_returns_a_stream(client: Reflective, tiny_quire: RunningQuire) -> None:
    (gateway,) = [name for name in client.services() if name.endswith(".Gateway")]
    request = {
        "prompt": {"text": "The quick brown fox"},
        "sampling": {"temperature": 0, "seed": SLOW_SEED},
        "stopping": {"maxTokens": 9, "ignoreEos": True},
        "timeout": "60s",
    }

    started, *deltas, finished = client.call(gateway, "Generate", request)
    assert len(deltas) > 1
    assert (set(started), set(finished)) == ({"started"}, {"finished"})
    received = sum(len(delta["delta"]["tokenIds"]) for delta in deltas)
    assert received == finished["finished"]["usage"]["generatedTokens"] == 9
    assert tiny_quire.settled_pool().sequences == 0


def test_detokenize_returns_the_tokenized_text(client: Reflective) -> None:
    (tokens,) = client.call("quire.v1.Gateway", "Tokenize", {"prompt": {"text": "Häuser"}})
    (text,) = client.call("quire.v1.Gateway", "Detokenize", {"tokenIds": tokens["tokenIds"]})
    assert text["text"] == "Häuser"


def test_an_invalid_field_is_named(client: Reflective) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(client.call("quire.v1.Gateway", "Generate", {"prompt": {"text": "x"}, "sampling": {"topP": 2}}))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "sampling.top_p" in caught.value.details()
