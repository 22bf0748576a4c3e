"""Settings of the gateway."""

from dataclasses import dataclass

from services.settings import check, setting


@dataclass(frozen=True)
class GatewaySettings:
    """Where clients come in, which engine answers, and how much may be under way.

    The service itself takes a local folder as `model`; the command line makes one of every other name.
    """

    listen: str = setting("127.0.0.1:50051", "Address to listen on: host:port or unix:/path.")
    engine: str = setting("127.0.0.1:50052", "Address of the engine.")
    model: str = setting("demo", "Model whose tokenizer is used: demo, a local folder, a .gguf file, or a hub id.")
    max_requests: int = setting(1024, "Requests under way at most; more are refused.", least=1)
    max_queued_tokens: int = setting(
        4_000_000, "Tokens, of prompts and of answers to come, that wait for an engine at most, of each model.", least=1
    )
    link_timeout_seconds: float = setting(
        10.0, "Seconds without a message after which the engine counts as gone.", least=0.1
    )
    max_buffered_tokens: int = setting(
        4096, "Tokens of a stream that wait for its client at most; beyond them it is ended.", least=1, most=8192
    )
    slow_client_seconds: float = setting(
        30.0, "Seconds that a client may leave a message unread; after them its stream is ended.", least=1.0
    )
    pinned_prompts: str = setting(
        "", "File of prompts to pin whenever the engine comes up, in JSON Lines. Empty: none."
    )
    grace_seconds: float = setting(30.0, "Seconds that running requests have to finish after SIGTERM.", least=0)

    def __post_init__(self) -> None:
        check(self)
