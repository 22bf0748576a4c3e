"""Settings of the KV manager."""

from dataclasses import dataclass

from kvmanager import limits
from services.runtime import exposure
from services.runtime.addresses import check_http_listen_address, check_listen_address, check_url
from services.runtime.logs import records
from services.runtime.metrics.vllm_names import COMPAT, METRICS_COMPAT
from services.runtime.ports import KVMANAGER, local
from services.runtime.settings import check, setting
from services.runtime.tracing.export import OTLP_ENDPOINT


@dataclass(frozen=True)
class KVManagerSettings:
    """Settings of the KV manager: addresses, leases, TLS, metrics, logs and records."""

    listen: str = setting(
        local(KVMANAGER.grpc), "Address to listen on: host:port or unix:/path.", form=check_listen_address
    )
    map_listen: str = setting(
        local(KVMANAGER.http),
        "Address of the live block map page: host:port. Empty: none.",
        may_be_empty=True,
        form=check_http_listen_address,
    )
    # Three times the time after which an unresponsive engine's stream is closed: see services.runtime.transport.
    lease_seconds: float = setting(30.0, "Seconds that the pool of a disconnected engine is kept.", least=0)
    max_blocks: int = setting(
        limits.MAX_BLOCKS,
        "Maximum blocks of all pools together, in both tiers. Each takes 36 bytes of memory, or 270 if it has a key.",
        least=1,
    )
    tls_certificate: str = setting("", exposure.TLS_CERTIFICATE)
    tls_key: str = setting("", exposure.TLS_KEY)
    tls_client_ca: str = setting("", exposure.TLS_CLIENT_CA)
    insecure: bool = setting(False, exposure.INSECURE.format(what="anyone who can connect can use it"))
    metrics_compat: str = setting("none", METRICS_COMPAT, choices=COMPAT)
    kv_cache_metrics_sample: float = setting(
        0.01, "Share of block lifetimes that the metrics sample, 0 to 1.", least=0, most=1
    )
    grace_seconds: float = setting(45.0, "Seconds that attached engines may take to detach after SIGTERM.", least=0)
    log_format: str = records.format_setting()
    log_level: str = records.level_setting()
    otlp_endpoint: str = setting("", OTLP_ENDPOINT, form=check_url)
    record_folder: str = setting(
        "", "Folder for records of all operations, one file per session, with token ids. Empty: none."
    )
    record_megabytes: int = setting(256, "Maximum size of one such file in MiB; recording stops there.", least=1)

    def __post_init__(self) -> None:
        check(self)
        exposure.check_tls(self)

    def check_exposure(self) -> None:
        """Raise InvalidSetting if other machines could use it without a certificate."""
        exposure.check_exposure(self, "tls_client_ca", "anyone who can connect can use it")
