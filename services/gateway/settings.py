"""Settings of the gateway."""

from dataclasses import dataclass

from services import exposure
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
    link_timeout_seconds: float = setting(
        10.0, "Seconds without a message after which the engine counts as gone.", least=0.1
    )
    pinned_prompts: str = setting(
        "", "File of prompts to pin whenever the engine comes up, in JSON Lines. Empty: none."
    )
    api_keys: str = setting("", "File of the API keys that clients must have one of, in TOML. Empty: nobody is asked.")
    prefixes: str = setting(
        "tenant",
        "Who shares cached prefixes, where API keys are asked for: requests of one tenant, or public, all of them.",
        choices=("tenant", "public"),
    )
    tls_certificate: str = setting("", exposure.TLS_CERTIFICATE)
    tls_key: str = setting("", exposure.TLS_KEY)
    tls_client_ca: str = setting("", exposure.TLS_CLIENT_CA)
    link_ca: str = setting("", exposure.LINK_CA.format(whom="the engine's"))
    link_certificate: str = setting("", exposure.LINK_CERTIFICATE)
    link_key: str = setting("", exposure.LINK_KEY)
    link_server_name: str = setting("", exposure.LINK_SERVER_NAME.format(whom="the engine's"))
    insecure: bool = setting(False, exposure.INSECURE.format(what="nobody is asked for an API key"))
    grace_seconds: float = setting(30.0, "Seconds that running requests have to finish after SIGTERM.", least=0)

    def __post_init__(self) -> None:
        check(self)
        exposure.check_tls(self, links=("engine",))

    def check_exposure(self) -> None:
        """Raise InvalidSetting when others than this machine could use it without an API key."""
        exposure.check_exposure(self, "api_keys", "nobody is asked for an API key")
