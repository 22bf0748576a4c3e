"""The ports at which services listen by default. The chart has them from here, and tests compare those of compose."""

from typing import NamedTuple


class Ports(NamedTuple):
    """The ports of a service: gRPC, metrics, and its HTTP server, the API or the block map; 0 without one."""

    grpc: int
    metrics: int
    http: int = 0


class EventPorts(NamedTuple):
    """The ports of KV events, which an engine does not open by default: routers expect them at these."""

    events: int
    replay: int


GATEWAY = Ports(50051, 9151, 8000)
ENGINE = Ports(50052, 9152)
KVMANAGER = Ports(50053, 9153, 8053)
KV_EVENTS = EventPorts(5557, 5558)


def local(port: int) -> str:
    """Return an address of this machine alone."""
    return f"127.0.0.1:{port}"
