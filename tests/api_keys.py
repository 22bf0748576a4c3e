"""API keys for tests."""

from collections.abc import Mapping
from pathlib import Path

import grpc

from quire.v1 import gateway_pb2_grpc
from services.gateway.access.api_keys import digest_of
from tests.running_quire import open_channel


def write_keys(path: Path, keys: Mapping[str, str]) -> Path:
    """Write a gateway's file of keys; the values are further TOML lines of the entries."""
    entries = [f'[[key]]\nsha256 = "{digest_of(key).hex()}"\n{rest}\n' for key, rest in keys.items()]
    path.write_text("\n".join(entries) or "key = []")
    return path


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


class Keyed:
    """A client of a gateway with its own API key and connection."""

    def __init__(self, address: str, key: str) -> None:
        self.channel = open_channel(address)
        self.metadata = bearer(key)
        self.gateway = gateway_pb2_grpc.GatewayStub(grpc.intercept_channel(self.channel, _Adding(self.metadata)))

    def close(self) -> None:
        self.channel.close()


class _Adding(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]
    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    def intercept_unary_unary(self, continuation, details, request):  # type: ignore[no-untyped-def]
        return continuation(details._replace(metadata=self._metadata), request)

    intercept_unary_stream = intercept_unary_unary
