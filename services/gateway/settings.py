"""Settings of the gateway."""

from dataclasses import dataclass

from services.settings import check, setting


@dataclass(frozen=True)
class GatewaySettings:
    """Where clients come in, which engine answers, and how much may be under way.

    The service itself takes a local folder as `model`; the command line makes one of every other name.
    """

    listen: str = setting("127.0.0.1:50051", "Address to listen on: host:port or unix:/path.")
    http_listen: str = setting(
        "127.0.0.1:8000", "Address of the OpenAI-compatible HTTP front: host:port. Empty: none.", may_be_empty=True
    )
    http_connections: int = setting(2048, "HTTP connections at most; more are refused.", least=1)
    http_read_seconds: float = setting(
        30.0, "Seconds that a client has for the head of an HTTP request, and again for its body.", least=0.1
    )
    http_write_seconds: float = setting(
        60.0, "Seconds without progress after which an HTTP client that does not read its answer is cut off.", least=0.1
    )
    engine: str = setting("127.0.0.1:50052", "Address of the engine.")
    model: str = setting("demo", "Model whose tokenizer is used: demo, a local folder, a .gguf file, or a hub id.")
    max_requests: int = setting(1024, "Requests under way at most; more are refused.", least=1)
    link_timeout_seconds: float = setting(
        10.0, "Seconds without a message after which the engine counts as gone.", least=0.1
    )
    pinned_prompts: str = setting(
        "", "File of prompts to pin whenever the engine comes up, in JSON Lines. Empty: none."
    )
    grace_seconds: float = setting(30.0, "Seconds that running requests have to finish after SIGTERM.", least=0)

    def __post_init__(self) -> None:
        check(self)
