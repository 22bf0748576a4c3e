"""Settings of the gateway."""

from dataclasses import dataclass

from services.gateway.access.origins import check_origins
from services.gateway.dialects.selection import AUTO, check_call_parser, check_reasoning_parser
from services.gateway.fleet.discovery import ServiceAddresses
from services.gateway.fleet.routing import RoutingPolicy
from services.runtime import exposure
from services.runtime.addresses import check_http_listen_address, check_listen_address, check_url
from services.runtime.logs import records
from services.runtime.metrics.vllm_names import COMPAT, METRICS_COMPAT
from services.runtime.ports import ENGINE, GATEWAY, local
from services.runtime.settings import Requires, check, setting
from services.runtime.tracing.export import OTLP_ENDPOINT

NO_PAGES, CHAT = "none", "chat"


@dataclass(frozen=True)
class GatewaySettings:
    """Addresses, engines, and limits of a gateway."""

    listen: str = setting(
        local(GATEWAY.grpc), "Address to listen on: host:port or unix:/path.", form=check_listen_address
    )
    http_listen: str = setting(
        local(GATEWAY.http),
        "Address of the OpenAI-compatible HTTP API: host:port. Empty: none.",
        may_be_empty=True,
        form=check_http_listen_address,
    )
    http_connections: int = setting(2048, "Maximum HTTP connections; more are rejected.", least=1)
    http_read_seconds: float = setting(
        30.0, "Seconds that receiving the head of an HTTP request may take, and again its body.", least=0.1
    )
    http_write_seconds: float = setting(
        60.0,
        "Seconds that a client may read nothing of its HTTP answer before it is disconnected.",
        least=0.1,
    )
    http_idle_seconds: float = setting(
        120.0,
        "Seconds that an HTTP connection may be idle before it is closed. Set it above the idle timeouts of clients "
        "and load balancers: they should close first, so that no request is lost.",
        least=1,
        most=86400,
    )
    allowed_origins: str = setting(
        "",
        "Origins of web pages that may call the HTTP API, separated by commas, such as https://chat.example; * for "
        "all. Empty: none.",
        form=check_origins,
    )
    pages: str = setting(
        NO_PAGES,
        "Web page to serve with the HTTP API. chat: a conversation at /chat/ that shows the blocks of its requests; "
        "`quire serve` has it where only this machine reaches the HTTP API.",
        choices=(NO_PAGES, CHAT),
        requires=(Requires("http_listen", without=("",), because="the HTTP API serves it"),),
    )
    max_connection_age_seconds: float = setting(
        0.0,
        "Age in seconds after which a client's connection takes no new requests. Clients then connect again, so new "
        "gateways get load. Requests in flight continue. 0: no limit.",
        least=0,
        most=86400,
    )
    engines: str = setting(
        local(ENGINE.grpc),
        "Addresses of the engines, separated by commas. dns:NAME:PORT means every address that NAME resolves to.",
    )
    discovery_seconds: float = setting(
        5.0, "Seconds after which the DNS names of engines are resolved again.", least=0.1
    )
    kvmanager: str = setting(
        "",
        "Addresses of the KV managers, in the same form; the gateway asks them which prefixes are cached. Empty: it "
        "estimates that from the requests it sent.",
    )
    routing: str = setting(
        "prefix",
        "How an engine is chosen. prefix: the longest cached prefix, within a bound on load; least-loaded; "
        "round-robin.",
        choices=tuple(policy.value for policy in RoutingPolicy),
    )
    routing_window_seconds: float = setting(
        60.0, "With --routing prefix: seconds over which an engine's recent load decays (time constant).", least=0.1
    )
    routing_slack_tokens: int = setting(
        16384, "With --routing prefix: tokens of load that an engine may have above its share.", least=0
    )
    failovers: int = setting(3, "Maximum failovers of a request to another engine.", least=0)
    failover_seconds: float = setting(10.0, "Seconds that a failover may wait for an engine.", least=0)
    max_requests: int = setting(1024, "Maximum sequences (samples, beams) in flight; more are rejected.", least=1)
    max_queued_tokens: int = setting(
        4_000_000, "Maximum queued tokens of each model, prompts and max_tokens together; more are rejected.", least=1
    )
    max_buffered_tokens: int = setting(
        4096,
        "Maximum tokens of a stream that its client has not read; with more, the request is cancelled.",
        least=1,
        most=8192,
    )
    stream_interval: int = setting(
        1,
        "Tokens of a stream that are sent together; after 50 ms fewer are sent. The first tokens of a stream are sent "
        "at once, the last with its end.",
        least=1,
        most=1024,
    )
    slow_client_seconds: float = setting(
        30.0, "Seconds that a write to a slow client may block before the request is cancelled.", least=1.0
    )
    link_timeout_seconds: float = setting(
        10.0, "Seconds that an engine may be silent before its link is closed.", least=0.1
    )
    tool_call_parser: str = setting(
        AUTO,
        "How the models write tool calls: a name of docs/dialects.md, Quire's or vLLM's. auto: as in their chat"
        " templates; none: calls stay text.",
        form=check_call_parser,
    )
    reasoning_parser: str = setting(
        AUTO,
        "How the models mark thinking: a name of docs/dialects.md, Quire's or vLLM's. auto: as in their chat templates;"
        " none: thinking stays text.",
        form=check_reasoning_parser,
    )
    pinned_prompts: str = setting(
        "", "File of prompts, in JSON Lines, that are pinned at each engine that connects. Empty: none."
    )
    api_keys: str = setting("", "File of API keys, in TOML. Empty: no key is needed.")
    prefixes: str = setting(
        "tenant",
        "Who shares cached prefixes when there are API keys. tenant: requests of one tenant; public: all.",
        choices=("tenant", "public"),
    )
    tls_certificate: str = setting("", exposure.TLS_CERTIFICATE)
    tls_key: str = setting("", exposure.TLS_KEY)
    tls_client_ca: str = setting("", exposure.TLS_CLIENT_CA)
    link_ca: str = setting("", exposure.LINK_CA.format(whom="the engines' and the KV manager's"))
    link_certificate: str = setting("", exposure.LINK_CERTIFICATE)
    link_key: str = setting("", exposure.LINK_KEY)
    link_server_name: str = setting("", exposure.LINK_SERVER_NAME.format(whom="the engines' and the KV manager's"))
    insecure: bool = setting(False, exposure.INSECURE.format(what="no API key is needed"))
    metrics_compat: str = setting("none", METRICS_COMPAT, choices=COMPAT)
    grace_seconds: float = setting(30.0, "Seconds that requests in flight may take to finish after SIGTERM.", least=0)
    log_format: str = records.format_setting()
    log_level: str = records.level_setting()
    otlp_endpoint: str = setting("", OTLP_ENDPOINT, form=check_url)
    trace_sample_ratio: float = setting(
        1.0, "Fraction of requests to trace if their clients did not decide.", least=0, most=1
    )

    def __post_init__(self) -> None:
        check(self)
        ServiceAddresses.of(self.engines)
        if self.kvmanager:
            ServiceAddresses.of(self.kvmanager, "kvmanager")
        exposure.check_tls(self, links=("engines", "kvmanager"))

    def check_exposure(self) -> None:
        """Raise InvalidSetting if other machines could use the gateway without an API key."""
        exposure.check_exposure(self, "api_keys", "no API key is needed")
