"""Settings of an engine."""

from dataclasses import dataclass, replace
from pathlib import PurePath

from engine.schedule.limits import MAX_PROPOSED_TOKENS, Limits, Preemption
from engine.schedule.speculation.ngram_index import MATCHES
from kvmanager.pool_spec import MAX_NAME_LENGTH, MAX_TIER_BLOCKS
from services.engine.events.settings import EventSettings
from services.engine.guided.json_output import JsonBounds
from services.runtime import exposure
from services.runtime.addresses import check_listen_address, check_server_address, check_url
from services.runtime.logs import records
from services.runtime.metrics.vllm_names import COMPAT, METRICS_COMPAT
from services.runtime.ports import ENGINE, KVMANAGER, local
from services.runtime.settings import InvalidSetting, Requires, check, setting
from services.runtime.tracing.export import OTLP_ENDPOINT

MAX_RANKS = 64
# Attention backends whose KV cache may have 8 bits.
CODED_BACKENDS = ("torch", "cpu")
PACKED = ("int8", "int4")
ONLY_CPU = "only the CPU's kernels run these weights"
RUNS_AHEAD = "steps of a GPU run ahead of their tokens"
OF_A_GPU = "the memory of a GPU ends with its process"
# Defaults by device. On a GPU a step of 2,048 tokens of Llama-3-8B computes some 40 ms, within the 100 ms of the alerts
# for the next token, and reads the weights and the cache of decoding sequences a quarter as often as one of 512. From
# some 250 sequences on (184 on an H200), products are bound by arithmetic, so more of them gain little.
CPU_TOKEN_BUDGET, GPU_TOKEN_BUDGET = 512, 2048
CPU_MAX_SEQUENCES, GPU_MAX_SEQUENCES = 64, 256
CPU_CACHE_MIB = 1024
# Values of keep_blocks that name no file or folder.
KEPT_WORDS = AUTO, MEMORY, OFF = "auto", "memory", "off"
GPU_MEMORY_UTILIZATION = 0.9
# Of settings that compare blocks.
_COMPARES_BLOCKS = (
    Requires("checksums", without=("off",), because="there is nothing to compare"),
    Requires("tensor_parallel", most=1, because="blocks of ranks have no checksums"),
    Requires("device", without=("cuda",), because="blocks of a GPU have no checksums"),
)


@dataclass(frozen=True)
class _OwnSettings:
    """The settings of an engine without those of KV events."""

    listen: str = setting(
        local(ENGINE.grpc), "Address to listen on: host:port or unix:/path.", form=check_listen_address
    )
    kvmanager: str = setting(local(KVMANAGER.grpc), "Address of the KV manager.", form=check_server_address)
    model: str = setting("demo", "Model: demo, a local folder, a .gguf file, or a hub id.")
    model_name: str = setting("", "Model name for clients. Empty: the last part of --model.")
    generation_config: str = setting(
        "auto",
        "Source of temperature, top_k, top_p, min_p, repetition_penalty and max_tokens for requests without them. "
        "auto: the model's generation_config.json; none; or a folder with another such file.",
    )
    engine_id: str = setting(
        "", "Name of this engine, unique at its KV manager. Empty: host name and address; in quire serve the host name."
    )
    device: str = setting(
        "auto", "Device of the model; auto uses a GPU if there is one.", choices=("auto", "cpu", "cuda")
    )
    dtype: str = setting(
        "auto",
        "Type of unquantized weights, and of the KV cache unless --kv-dtype is given. auto: bfloat16 on GPUs and on "
        "CPUs that have kernels, else float32.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    kv_dtype: str = setting(
        "auto",
        "Type of the KV cache. auto: that of --dtype; int8: about half the memory of bfloat16, with a scale for each "
        "token and head (on CPUs, and with the backend torch).",
        choices=("auto", "int8"),
        requires=(
            Requires("tensor_parallel", most=1),
            Requires("attention_backend", among=("auto", *CODED_BACKENDS), because="the others read no such cache"),
            Requires("attention_backend", among=("torch",), where={"device": "cuda"}),
        ),
    )
    weights: str = setting(
        "auto",
        "Format of the weights. auto: as in the files; bf16; int8 or int4: quantized at the start. Only CPUs compute "
        "with quantized weights, and only in bfloat16; otherwise auto dequantizes them.",
        choices=("auto", "bf16", "int8", "int4"),
        requires=(
            Requires("dtype", among=("auto", "bfloat16")),
            Requires("device", among=("auto", "cpu"), of=PACKED, because=ONLY_CPU),
            Requires("attention_backend", among=("auto", "cpu"), of=PACKED, because=ONLY_CPU),
            Requires("tensor_parallel", most=1, of=PACKED),
        ),
    )
    attention_backend: str = setting(
        "auto",
        "Attention kernels. torch: its operators; cpu: C++, compiled at the first start; triton: for GPUs; flex: "
        "compiled by torch.compile during the first steps. auto: the fastest.",
        choices=("auto", "torch", "cpu", "triton", "flex"),
        requires=(
            Requires("device", without=("cpu",), of=("triton",)),
            Requires("device", without=("cuda",), of=("cpu",)),
            Requires("tensor_parallel", most=1, of=("flex",)),
        ),
    )
    kernels_folder: str = setting("", "Folder for compiled kernels. Empty: beside the downloaded models.")
    block_size: int = setting(16, "Tokens per KV block.", least=1, most=4096)
    device_blocks: int = setting(
        0, "Blocks of the pool. 0: as many as fit into --cache-mib.", least=0, most=MAX_TIER_BLOCKS
    )
    cache_mib: int = setting(
        0,
        f"Memory for the KV cache in MiB, unless --device-blocks is given. 0: {CPU_CACHE_MIB}, on a GPU what is left "
        "of --gpu-memory-utilization.",
        least=0,
    )
    gpu_memory_utilization: float = setting(
        GPU_MEMORY_UTILIZATION,
        "Fraction of a GPU's memory for weights, a step and the pool, unless --device-blocks or --cache-mib is given.",
        least=0.01,
        most=1,
        requires=(
            Requires("device", without=("cpu",), because="the pool of a CPU has cache_mib"),
            Requires("device_blocks", among=(0,), because="give one of them"),
            Requires("cache_mib", among=(0,), because="give one of them"),
            Requires("attention_backend", without=("flex",), because="its pool has cache_mib"),
        ),
    )
    kinds: str = setting(
        "auto",
        "Kinds of blocks. auto: on CPUs, layers with a window keep only the tokens that they see; off: all layers keep "
        "all tokens.",
        choices=("auto", "off"),
    )
    typical_tokens: int = setting(
        0,
        "Tokens of a typical request, prompt and answer; decides how memory is divided among kinds of blocks. 0: half "
        "the context.",
        least=0,
        most=1 << 20,
        requires=(Requires("kinds", without=("off",), because="there is nothing to divide"),),
    )
    retention_tokens: int = setting(
        0,
        "Interval in tokens at which layers with windows keep the blocks that a prompt needs to continue there; these "
        "blocks are evicted first. 0: only behind prompts, answers and branches.",
        least=0,
        most=1 << 20,
        requires=(Requires("kinds", without=("off",), because="no block leaves a window"),),
    )
    host_blocks: int = setting(
        0,
        "Blocks in host memory, for preempted requests and for cached prefixes that were evicted from the device.",
        least=0,
        most=MAX_TIER_BLOCKS,
    )
    keep_blocks: str = setting(
        "auto",
        "Where cached blocks outlive the engine's process: a file in tmpfs or hugetlbfs; a folder there, for a file "
        "named after --engine-id; memory: held by quire serve; or off. auto: memory under quire serve on a CPU, else "
        "off.",
        requires=(
            Requires("tensor_parallel", most=1, besides=("off",), because="ranks keep no blocks"),
            Requires("device", without=("cuda",), besides=("off",), because=OF_A_GPU),
            Requires("attention_backend", without=("triton",), besides=("off",), because=OF_A_GPU),
        ),
    )
    checksums: str = setting(
        "auto",
        "Checksums of blocks. auto: on CPUs, computed when a block is full and compared when its bytes are copied "
        "back; off.",
        choices=("auto", "off"),
    )
    verify_blocks: float = setting(
        0.01,
        "Share of hit blocks to compare with their checksums. It is for blocks that never left the cache; blocks from "
        "the host tier, or from before an engine's restart, are always compared.",
        least=0,
        most=1,
        requires=_COMPARES_BLOCKS,
    )
    recompute_hits: float = setting(
        0.0,
        "Share of requests with cached blocks for which an idle engine computes these blocks again, to compare them. "
        "It finds blocks that were wrong before they had a checksum.",
        least=0,
        most=1,
        requires=_COMPARES_BLOCKS,
    )
    keep_at_stop: bool = setting(
        False,
        "Keep the blocks when the engine is stopped, too. Otherwise a planned end erases them.",
        requires=(Requires("keep_blocks", without=("off",), because="nothing is kept"),),
    )
    preemption: str = setting(
        "auto",
        "What happens to a preempted request's blocks: recompute them later, swap them to host blocks, or auto, the "
        "cheaper one.",
        choices=tuple(way.value for way in Preemption),
    )
    admission_watermark: float = setting(
        0.01,
        "Fraction of the blocks that admission leaves free while other requests run, so that these can grow.",
        least=0,
        most=0.5,
    )
    priority_aging: float = setting(
        30.0,
        "Seconds of waiting that are worth one level of priority. 0: no aging.",
        least=0,
    )
    isolation_seconds: float = setting(
        10.0,
        "Maximum seconds that other requests wait while a request that may have taken down engines is computed alone "
        "in its batch.",
        least=0.1,
    )
    token_budget: int = setting(
        0,
        f"Maximum tokens in one step, prefill and decode together. 0: {CPU_TOKEN_BUDGET}, on a GPU {GPU_TOKEN_BUDGET}.",
        least=0,
        most=1 << 17,
    )
    admission_budget: int = setting(
        0,
        "Maximum uncached tokens of the requests that are admitted at one time; short prompts have as many again for "
        "themselves. 0: --token-budget.",
        least=0,
        most=1 << 20,
    )
    long_prefill_token_threshold: int = setting(
        0,
        "Uncomputed tokens above which a prompt is long: short prompts of the same priority are computed first. 0: "
        "--token-budget. -1: no prompt is long, all are computed in the order of arrival.",
        least=-1,
        most=1 << 30,
    )
    max_num_partial_prefills: int = setting(
        1, "Maximum prompts that share the token budget of a step in equal parts.", least=1, most=2048
    )
    max_long_partial_prefills: int = setting(
        1,
        "Maximum long prompts that share in equal parts what short ones leave of the token budget.",
        least=1,
        most=2048,
    )
    max_sequences: int = setting(
        0,
        f"Maximum sequences that hold blocks at the same time. 0: {CPU_MAX_SEQUENCES}, on a GPU {GPU_MAX_SEQUENCES}.",
        least=0,
        most=2048,
    )
    max_waiting: int = setting(1024, "Maximum requests that wait for blocks.", least=1)
    speculate_ngram: int = setting(
        0,
        "Maximum draft tokens per sequence and step, from n-grams of its prompt and answer, used only if they pay; on "
        "CPUs only. 0: speculation is off.",
        least=0,
        most=MAX_PROPOSED_TOKENS,
        requires=(
            Requires("tensor_parallel", most=1, because="ranks verify no draft tokens"),
            Requires("device", without=("cuda",), because=RUNS_AHEAD),
            Requires("attention_backend", without=("triton",), because=RUNS_AHEAD),
        ),
    )
    speculate_ngram_min: int = setting(
        MATCHES[-1],
        "Minimum length of an n-gram whose continuation becomes draft tokens. Longer n-grams are found less often, and "
        "right more often.",
        least=MATCHES[-1],
        most=MATCHES[0],
        requires=(
            Requires("speculate_ngram", without=(0,), because="there are no draft tokens without it"),
            Requires("tensor_parallel", most=1, because="ranks verify no draft tokens"),
        ),
    )
    json_blanks: int = setting(
        1,
        "Maximum whitespace characters between two tokens of guided JSON. 1: one space; more: any whitespace.",
        least=0,
        most=32,
    )
    json_integer_digits: int = setting(
        20, "Maximum digits before the decimal point of a number in guided JSON.", least=1, most=400
    )
    json_decimals: int = setting(
        8, "Maximum digits after the decimal point of a number in guided JSON.", least=1, most=400
    )
    json_exponent_digits: int = setting(
        2, "Maximum digits of the exponent of a number in guided JSON.", least=1, most=4
    )
    threads: int = setting(
        0,
        "Threads that compute on a CPU. 0: one for each core of this machine, or of the container's quota.",
        least=0,
        most=1024,
    )
    tensor_parallel: int = setting(
        1,
        "Processes (ranks) that compute the model together, each with a GPU and a slice of weights and KV cache.",
        least=1,
        most=MAX_RANKS,
    )
    rank_seconds: float = setting(
        10.0, "Seconds that a rank may be silent before all ranks of the engine end.", least=0.5, most=3600
    )
    seconds_without_kvmanager: float = setting(
        30.0, "Seconds without the KV manager after which requests fail and gateways send no new ones.", least=0
    )
    heartbeat_seconds: float = setting(
        2.0, "Seconds without output after which a gateway receives a heartbeat.", least=0.05
    )
    record_requests: str = setting(
        "", "File in which all requests are recorded: keys and lengths, no token ids. Empty: no record."
    )
    tls_certificate: str = setting("", exposure.TLS_CERTIFICATE)
    tls_key: str = setting("", exposure.TLS_KEY)
    tls_client_ca: str = setting("", exposure.TLS_CLIENT_CA)
    link_ca: str = setting("", exposure.LINK_CA.format(whom="the KV manager's"))
    link_certificate: str = setting("", exposure.LINK_CERTIFICATE)
    link_key: str = setting("", exposure.LINK_KEY)
    link_server_name: str = setting("", exposure.LINK_SERVER_NAME.format(whom="the KV manager's"))
    insecure: bool = setting(False, exposure.INSECURE.format(what="anyone who can connect can use it"))
    metrics_compat: str = setting("none", METRICS_COMPAT, choices=COMPAT)
    grace_seconds: float = setting(30.0, "Seconds for running requests to finish after SIGTERM.", least=0)
    log_format: str = records.format_setting()
    log_level: str = records.level_setting()
    otlp_endpoint: str = setting("", OTLP_ENDPOINT, form=check_url)


@dataclass(frozen=True)
class EngineSettings(EventSettings, _OwnSettings):  # fields of the last base are the first
    """Settings of one engine: model, memory, limits of steps, links, and KV events.

    The service takes a local folder as `model`; the command line resolves all other names to one.
    """

    def __post_init__(self) -> None:
        check(self)
        exposure.check_tls(self, links=("kvmanager",))
        self.check_event_addresses()
        self._check_names()
        try:
            self.limits()
        except ValueError as error:
            raise InvalidSetting(str(error)) from error

    def _check_names(self) -> None:
        """Check the names that the KV manager receives."""
        model = "model_name" if self.model_name else "model"
        for field, name in (("engine_id", self.engine_id), (model, self.served_name())):
            if len(name) > MAX_NAME_LENGTH:
                raise InvalidSetting(f"{field} must have at most {MAX_NAME_LENGTH} characters, not {len(name)}")
            if not name.isprintable():
                raise InvalidSetting(f"{field} must be printable text, not {name!r}")

    def for_device(self, *, on_gpu: bool) -> "EngineSettings":
        """Return the settings with the device's defaults. On a GPU, a pool without a size (0) is to be measured.

        Raises InvalidSetting if a setting is only for the other device.
        """
        limits = self.limits(on_gpu=on_gpu)
        # FlexAttention addresses at most 2^31 elements.
        measured = self.device_blocks or (on_gpu and self.attention_backend != "flex")
        return replace(
            self,
            device="cuda" if on_gpu else "cpu",
            token_budget=limits.token_budget,
            max_sequences=limits.max_sequences,
            cache_mib=self.cache_mib or (0 if measured else CPU_CACHE_MIB),
        )

    def check_exposure(self) -> None:
        """Raise InvalidSetting if other machines could use it without a certificate."""
        exposure.check_exposure(self, "tls_client_ca", "anyone who can connect can use it")
        self.check_event_exposure()

    def limits(self, *, on_gpu: bool = False) -> Limits:
        """Return the limits of a step and of the queue. Defaults of the device give way to what is set."""
        usual = (GPU_TOKEN_BUDGET, GPU_MAX_SEQUENCES) if on_gpu else (CPU_TOKEN_BUDGET, CPU_MAX_SEQUENCES)
        sequences = self.max_sequences or min(usual[1], self.token_budget or usual[1])
        token_budget = self.token_budget or max(usual[0], sequences)
        return Limits(
            token_budget,
            sequences,
            self.max_waiting,
            Preemption(self.preemption),
            self.admission_watermark,
            self.priority_aging,
            self.isolation_seconds,
            self.speculate_ngram,
            self.admission_budget,
            max(0, self.long_prefill_token_threshold or token_budget),
            self.max_num_partial_prefills,
            self.max_long_partial_prefills,
            self.speculate_ngram_min,
        )

    def json_bounds(self) -> JsonBounds:
        """Return the bounds of guided JSON."""
        return JsonBounds(self.json_blanks, self.json_integer_digits, self.json_decimals, self.json_exponent_digits)

    def served_name(self) -> str:
        """Return the model's name for clients."""
        return self.model_name or PurePath(self.model).name
