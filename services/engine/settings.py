"""Settings of an engine."""

from dataclasses import dataclass
from pathlib import PurePath

from engine.schedule.limits import Limits, Preemption
from kvmanager.pool_spec import MAX_NAME_LENGTH, MAX_TIER_BLOCKS
from services.engine.guided.json_output import JsonBounds
from services.runtime import exposure, logs
from services.runtime.metrics.vllm_names import COMPAT, METRICS_COMPAT
from services.runtime.settings import InvalidSetting, check, setting
from services.runtime.tracing.export import OTLP_ENDPOINT


@dataclass(frozen=True)
class EngineSettings:
    """One model, its memory, the bounds of its steps, and the links to its neighbours.

    The service itself takes a local folder as `model`; the command line makes one of every other name.
    """

    listen: str = setting("127.0.0.1:50052", "Address to listen on: host:port or unix:/path.")
    kvmanager: str = setting("127.0.0.1:50053", "Address of the KV manager.")
    model: str = setting("demo", "Model: demo, a local folder, a .gguf file, or a hub id.")
    model_name: str = setting("", "Name under which clients ask for the model. Empty: as --model.")
    engine_id: str = setting("", "Unique name at the KV manager. Empty: host name and address.")
    device: str = setting(
        "auto", "Where the model runs; auto takes a GPU if there is one.", choices=("auto", "cpu", "cuda")
    )
    dtype: str = setting(
        "auto",
        "Type of weights and cache; auto is bfloat16 on a GPU, and on a CPU that multiplies it and has a compiler; "
        "else float32.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    attention_backend: str = setting(
        "auto",
        "Kernels of attention: torch's operators; cpu, compiled at the first start; triton, for GPUs; flex, made by "
        "torch.compile at the first steps. auto takes the fastest.",
        choices=("auto", "torch", "cpu", "triton", "flex"),
    )
    kernels_folder: str = setting("", "Folder that keeps compiled kernels. Empty: beside the models that were fetched.")
    block_size: int = setting(16, "Tokens that one KV block holds.", least=1, most=4096)
    device_blocks: int = setting(
        0, "Blocks of the pool. 0: as many as --cache-mib holds.", least=0, most=MAX_TIER_BLOCKS
    )
    cache_mib: int = setting(1024, "Memory for the KV cache in MiB, unless --device-blocks is given.", least=1)
    host_blocks: int = setting(
        0,
        "Blocks of host memory, for preempted requests and for prefixes that the pool has no room for.",
        least=0,
        most=MAX_TIER_BLOCKS,
    )
    preemption: str = setting(
        "auto",
        "How a request gives its blocks up: computed again, swapped to host blocks, or what costs less.",
        choices=tuple(way.value for way in Preemption),
    )
    admission_watermark: float = setting(
        0.01,
        "Fraction of the blocks that a request leaves free when it begins while others run, for these to grow.",
        least=0,
        most=0.5,
    )
    priority_aging: float = setting(
        30.0,
        "Seconds that each level of priority is worth: who has waited longer by as much goes first. 0: no aging.",
        least=0,
    )
    isolation_seconds: float = setting(
        10.0,
        "Seconds that other requests wait at most while one is computed with no other in its batch, because engines "
        "were lost with it before.",
        least=0.1,
    )
    token_budget: int = setting(
        512, "Tokens fed in one step at most, prompts and decoding together.", least=1, most=1 << 17
    )
    max_sequences: int = setting(64, "Sequences that hold blocks at the same time at most.", least=1, most=2048)
    max_waiting: int = setting(1024, "Requests that wait for blocks at most.", least=1)
    json_blanks: int = setting(
        1,
        "Blanks between two tokens of guided JSON at most: none, one space, or so many of any kind.",
        least=0,
        most=32,
    )
    json_integer_digits: int = setting(
        20, "Digits before the point after which a number of guided JSON goes on otherwise.", least=1, most=400
    )
    json_decimals: int = setting(
        8, "Digits after the point after which a number of guided JSON goes on otherwise.", least=1, most=400
    )
    json_exponent_digits: int = setting(
        2, "Digits of the exponent after which a number of guided JSON ends.", least=1, most=4
    )
    threads: int = setting(0, "Threads of the compute kernels. 0: torch decides.", least=0)
    seconds_without_kvmanager: float = setting(
        30.0, "Seconds without the KV manager after which requests fail, and gateways send no more.", least=0
    )
    heartbeat_seconds: float = setting(
        2.0, "Seconds without output after which a gateway gets a heartbeat.", least=0.05
    )
    record_requests: str = setting(
        "", "File for a record of all requests: keys and lengths, no token ids. Empty: none."
    )
    tls_certificate: str = setting("", exposure.TLS_CERTIFICATE)
    tls_key: str = setting("", exposure.TLS_KEY)
    tls_client_ca: str = setting("", exposure.TLS_CLIENT_CA)
    link_ca: str = setting("", exposure.LINK_CA.format(whom="the KV manager's"))
    link_certificate: str = setting("", exposure.LINK_CERTIFICATE)
    link_key: str = setting("", exposure.LINK_KEY)
    link_server_name: str = setting("", exposure.LINK_SERVER_NAME.format(whom="the KV manager's"))
    insecure: bool = setting(False, exposure.INSECURE.format(what="anyone who reaches it can use it"))
    metrics_compat: str = setting("none", METRICS_COMPAT, choices=COMPAT)
    grace_seconds: float = setting(30.0, "Seconds that running requests have to finish after SIGTERM.", least=0)
    log_format: str = logs.format_setting()
    log_level: str = logs.level_setting()
    otlp_endpoint: str = setting("", OTLP_ENDPOINT)

    def __post_init__(self) -> None:
        check(self)
        exposure.check_tls(self, links=("kvmanager",))
        self._check_names()
        try:
            self.limits()
        except ValueError as error:
            raise InvalidSetting(str(error)) from error

    def _check_names(self) -> None:
        """Check what the KV manager is told of this engine."""
        model = "model_name" if self.model_name else "model"
        for field, name in (("engine_id", self.engine_id), (model, self.served_name())):
            if len(name) > MAX_NAME_LENGTH:
                raise InvalidSetting(
                    f"{field} is a name of {len(name)} characters, it must have {MAX_NAME_LENGTH} at most"
                )
            if not name.isprintable():
                raise InvalidSetting(f"{field} is {name!r}, it must be printable text")

    def check_exposure(self) -> None:
        """Raise InvalidSetting when others than this machine could use it without a certificate."""
        exposure.check_exposure(self, "tls_client_ca", "anyone who reaches it can use it")

    def limits(self) -> Limits:
        """Return the bounds of a step and of the queue."""
        return Limits(
            self.token_budget,
            self.max_sequences,
            self.max_waiting,
            Preemption(self.preemption),
            self.admission_watermark,
            self.priority_aging,
            self.isolation_seconds,
        )

    def json_bounds(self) -> JsonBounds:
        """Return how guided JSON is written."""
        return JsonBounds(self.json_blanks, self.json_integer_digits, self.json_decimals, self.json_exponent_digits)

    def served_name(self) -> str:
        """Return the name under which clients ask for the model."""
        return self.model_name or PurePath(self.model).name
