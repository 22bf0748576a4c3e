"""Settings of the gateway."""

from dataclasses import dataclass

from services.gateway.fleet.discovery import EngineAddresses
from services.gateway.fleet.routing import RoutingPolicy
from services.runtime import exposure, logs
from services.runtime.metrics.vllm_names import COMPAT, METRICS_COMPAT
from services.runtime.settings import check, setting
from services.runtime.tracing.export import OTLP_ENDPOINT


@dataclass(frozen=True)
class GatewaySettings:
    """Where clients come in, which engines answer, and how much may be under way."""

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
    engines: str = setting(
        "127.0.0.1:50052",
        "Addresses of the engines, with commas between them. dns:NAME:PORT stands for every address that the name has.",
    )
    discovery_seconds: float = setting(5.0, "Seconds after which names of engines are looked up again.", least=0.1)
    kvmanager: str = setting(
        "", "Address of the KV manager, which knows what engines have cached. Empty: the gateway goes by its memory."
    )
    routing: str = setting(
        "prefix",
        "Who gets a request: the engine that has most of its prompt, unless it has too much to do; the one with least "
        "to do; or each in turn.",
        choices=tuple(policy.value for policy in RoutingPolicy),
    )
    routing_window_seconds: float = setting(
        60.0, "With --routing prefix: seconds for which an engine's work counts as its load.", least=0.1
    )
    routing_slack_tokens: int = setting(
        16384, "With --routing prefix: tokens of work that an engine may be ahead of its share of the load.", least=0
    )
    failovers: int = setting(3, "Times that a request may go on at another engine when its own is lost.", least=0)
    failover_seconds: float = setting(10.0, "Seconds that a request then waits for an engine.", least=0)
    max_requests: int = setting(
        1024, "Sequences of requests (samples, beams) under way at most; more are refused.", least=1
    )
    max_queued_tokens: int = setting(
        4_000_000, "Tokens, of prompts and of answers to come, that wait for an engine at most, of each model.", least=1
    )
    max_buffered_tokens: int = setting(
        4096, "Tokens of a stream that wait for its client at most; beyond them it is ended.", least=1, most=8192
    )
    slow_client_seconds: float = setting(
        30.0, "Seconds that a client may leave a message unread; after them its stream is ended.", least=1.0
    )
    link_timeout_seconds: float = setting(
        10.0, "Seconds without a message after which an engine counts as gone.", least=0.1
    )
    pinned_prompts: str = setting("", "File of prompts to pin whenever an engine comes up, in JSON Lines. Empty: none.")
    api_keys: str = setting("", "File of the API keys that clients must have one of, in TOML. Empty: nobody is asked.")
    prefixes: str = setting(
        "tenant",
        "Who shares cached prefixes, where API keys are asked for: requests of one tenant, or public, all of them.",
        choices=("tenant", "public"),
    )
    tls_certificate: str = setting("", exposure.TLS_CERTIFICATE)
    tls_key: str = setting("", exposure.TLS_KEY)
    tls_client_ca: str = setting("", exposure.TLS_CLIENT_CA)
    link_ca: str = setting("", exposure.LINK_CA.format(whom="the engines' and the KV manager's"))
    link_certificate: str = setting("", exposure.LINK_CERTIFICATE)
    link_key: str = setting("", exposure.LINK_KEY)
    link_server_name: str = setting("", exposure.LINK_SERVER_NAME.format(whom="the engines' and the KV manager's"))
    insecure: bool = setting(False, exposure.INSECURE.format(what="nobody is asked for an API key"))
    metrics_compat: str = setting("none", METRICS_COMPAT, choices=COMPAT)
    grace_seconds: float = setting(30.0, "Seconds that running requests have to finish after SIGTERM.", least=0)
    log_format: str = logs.format_setting()
    log_level: str = logs.level_setting()
    otlp_endpoint: str = setting("", OTLP_ENDPOINT)
    trace_sample_ratio: float = setting(
        1.0, "Fraction of the requests to trace, of those whose client does not say.", least=0, most=1
    )

    def __post_init__(self) -> None:
        check(self)
        EngineAddresses.of(self.engines)
        exposure.check_tls(self, links=("engines", "kvmanager"))

    def check_exposure(self) -> None:
        """Raise InvalidSetting when others than this machine could use it without an API key."""
        exposure.check_exposure(self, "api_keys", "nobody is asked for an API key")
