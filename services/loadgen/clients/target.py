"""Whom a load goes to, and what a client of it can do."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from services.loadgen.records import Record
from services.loadgen.workload.prompts import Prompt
from services.runtime.tls import TLSFiles


class Unreachable(Exception):
    """The server does not answer, or not as it should; the message says what it said."""


class RequestFailed(Exception):
    """A request that came to no good end.

    `status` is a gRPC status' name, the number of an HTTP status, or names what became of the connection.
    `retry_after` is when the server asked to come again, in seconds.
    """

    def __init__(self, status: str, message: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


@dataclass(frozen=True)
class Target:
    """A server, and how it is asked. `prompt_seed` decides the prompts' tokens.

    `kind` is `grpc` for a Quire gateway at `host:port` or `unix:/path`, else `completions` or `chat` for the path of an
    OpenAI-compatible server at a URL. `tls` has whom to trust, and what to show who asks; `server_name` replaces the
    host in what the server's certificate must name. `extra_body` is added to each JSON request.
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

    def told(self) -> dict[str, Any]:
        """Describe it, for a report; without the key."""
        told = {name: value for name, value in vars(self).items() if name != "api_key"}
        return told | {"tls": None if self.tls is None else vars(self.tls)}


@dataclass(frozen=True)
class Server:
    """What a server says of itself; None where it does not say."""

    model: str
    vocabulary_size: int | None = None
    context_tokens: int | None = None
    told: dict[str, Any] = field(default_factory=dict)


class Client(Protocol):
    """Asks one server. Made inside the event loop that it is used in."""

    async def describe(self) -> Server:
        """Ask the server what it serves. Raises Unreachable."""
        ...

    def prepare(self, prompt: Prompt, output_tokens: int) -> Any:
        """Make the message that `send` takes: what can be done before it is time."""
        ...

    async def send(self, request: Any, record: Record) -> None:
        """Send a request, and note in the record what comes, and what the server counted. Raises RequestFailed."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...
