"""Settings of the KV manager."""

from dataclasses import dataclass

from services.settings import check, setting


@dataclass(frozen=True)
class KVManagerSettings:
    """Where the KV manager listens, and how long it lets its engines leave."""

    listen: str = setting("127.0.0.1:50053", "Address to listen on: host:port or unix:/path.")
    grace_seconds: float = setting(45.0, "Seconds that attached engines have to leave after SIGTERM.", least=0)

    def __post_init__(self) -> None:
        check(self)
