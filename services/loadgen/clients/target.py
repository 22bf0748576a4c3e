"""The target of a load, and the protocol of its clients."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from services.loadgen.records import Record
from services.loadgen.workload.prompts import Prompt
from services.runtime.tls import TLSFiles


class Unreachable(Exception):
    """The server does not answer, or answers in an unexpected way; the message holds its answer."""


class RequestFailed(Exception):
    """A failed request.

    `status` is a gRPC status' name, the number of an HTTP status, or names the failure of the connection.
    `retry_after` is the server's Retry-After in seconds.
    """

    def __init__(self, status: str, message: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


@dataclass(frozen=True)
class Target:
    """A server and how to call it. `prompt_seed` is the seed of the prompts' tokens.

    `kind` is `grpc` for a Quire gateway at `host:port` or `unix:/path`, else `completions` or `chat` for the path of an
    OpenAI-compatible server at a URL. `tls` has the trusted authorities and the client's certificate; `server_name`
    replaces the host that the server's certificate must name. `extra_body` is added to each JSON request.
    """

    kind: str
    address: str
    model: str = ""
    api_key: str = field(default="", repr=False)
    tls: TLSFiles | None = None
    server_name: str = ""
    vocabulary_size: int | None = None
    prompt_seed: int = 0
    ignore_eos: bool = True
    temperature: float | None = 0.0
    timeout_seconds: float = 600.0
    extra_body: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the description for a report, without the API key."""
        values = {name: value for name, value in vars(self).items() if name != "api_key"}
        return values | {"tls": None if self.tls is None else vars(self.tls)}


@dataclass(frozen=True)
class Server:
    """A server's description of itself; None for values that it does not report."""

    model: str
    vocabulary_size: int | None = None
    context_tokens: int | None = None
    details: dict[str, Any] = field(default_factory=dict)


class Client(Protocol):
    """Client of one server. Must be created inside the event loop that uses it."""

    async def describe(self) -> Server:
        """Fetch the server's description. Raises Unreachable."""
        ...

    def prepare(self, prompt: Prompt, output_tokens: int) -> Any:
        """Build the message for `send` before its time, so that sending is fast."""
        ...

    async def send(self, request: Any, record: Record) -> None:
        """Send a request, and record its tokens and the server's usage. Raises RequestFailed."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...
