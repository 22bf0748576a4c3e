"""The dashboard "Block utilization": use of the pool's blocks, and cost of their management."""

from deploy.grafana.engine_panels import (
    HELD_SHARE,
    KV_EVENTS,
    MISSED_EVENTS,
    PREEMPTIONS,
    PREFIX_CACHE_HIT_RATE,
    REPLAYS,
    SUBSCRIBERS,
)
from deploy.grafana.panels import (
    BY_RELEASE,
    OF_ENGINE,
    OF_RELEASE,
    OF_TENANT,
    SLOTS,
    STATES,
    Board,
    Panel,
    Query,
    Row,
    quantiles,
    rate,
    ratio,
)

_OF_BLOCKS = f'{OF_ENGINE},kind="all",tier="device"'
_HELD = f'sum by ({BY_RELEASE}, engine) (quire_kv_blocks{{{_OF_BLOCKS},state="held"}})'
_COMPUTED = (
    f"{rate('quire_prompt_tokens_total')} - {rate('quire_prompt_tokens_cached_total')} + "
    f"{rate('quire_generation_tokens_total')} + {rate('quire_recomputed_tokens_total')}"
)


def _of_tenant(kind: str) -> str:
    return rate("quire_tenant_tokens_total", "tenant", f'{OF_TENANT},kind="{kind}"')


def _blocks(tier: str, state: str) -> str:
    """Count blocks of all kinds."""
    return f'sum by ({BY_RELEASE}, engine) (quire_kv_blocks{{{OF_ENGINE},tier="{tier}",state="{state}"}})'


def _share_by_kind(tier: str, states: str) -> str:
    """Return the share of blocks in these states, of all blocks of each kind."""
    by = f"sum by ({BY_RELEASE}, engine, kind)"
    in_states = f'{by} (quire_kv_blocks{{{OF_ENGINE},tier="{tier}",state=~"{states}"}})'
    return f'{in_states} / {by} (quire_kv_pool_blocks{{{OF_ENGINE},tier="{tier}"}})'


_POOL = (
    Panel(
        "Blocks by state",
        "Every block is in one state. Held: a running request holds it. Cached: without holder, but a prompt with "
        "the same prefix can hit it. Free: empty. Withheld: removed by the audit. Summed over the kinds of blocks, "
        "which differ in bytes.",
        tuple(Query(_blocks("device", state), f"{{{{engine}}}} {state}") for state in STATES),
        stacked=STATES,
    ),
    HELD_SHARE,
    Panel(
        "Held share by kind",
        "Blocks that requests hold, of all blocks of the kind. If only a window kind is near 1, a smaller "
        "--typical-tokens gives it more of the memory; if only kind all is, a larger one gives that more.",
        (Query(_share_by_kind("device", "held"), "{{engine}} {{kind}}"),),
        unit="percentunit",
        maximum=1,
        warn=0.9,
        alarm=0.98,
    ),
    Panel(
        "Blocks granted, evicted and copied",
        "Evicted: cached blocks whose contents were dropped for space. Copied: copy-on-write of shared blocks. Of kind "
        "all.",
        (
            Query(rate("quire_kv_granted_blocks_total"), "{{engine}} granted"),
            Query(rate("quire_kv_evicted_blocks_total"), "{{engine}} evicted"),
            Query(rate("quire_kv_copied_blocks_total"), "{{engine}} copied"),
        ),
        unit="/s",
    ),
    Panel(
        "Requests",
        "Running requests hold blocks, waiting ones do not.",
        (
            Query(f"quire_num_requests_running{{{OF_ENGINE}}}", "{{engine}} running"),
            Query(f"quire_num_requests_waiting{{{OF_ENGINE}}}", "{{engine}} waiting"),
        ),
    ),
    Panel(
        "Host blocks by state",
        "With a host tier: blocks of swapped requests are held, those that the pool had no room for are cached. Summed "
        "over the kinds of blocks, which differ in bytes.",
        tuple(Query(_blocks("host", state), f"{{{{engine}}}} {state}") for state in STATES),
        stacked=STATES,
    ),
    Panel(
        "Used share of the host tier by kind",
        "Held and cached blocks, of all host blocks of the kind.",
        (Query(_share_by_kind("host", "held|cached"), "{{engine}} {{kind}}"),),
        unit="percentunit",
        maximum=1,
    ),
    Panel(
        "Blocks moved between the tiers",
        "To the host by swaps and instead of eviction, and back to the device. Of kind all.",
        (Query(rate("quire_kv_moved_blocks_total", "engine, to"), "{{engine}} to {{to}}"),),
        unit="/s",
    ),
)
_WASTE = (
    Panel(
        "Slots of held blocks",
        "By use: tokens computed, reserved for the running prefill, blocks granted ahead, and the rest of partly "
        "filled blocks. Of kind all. There is no external fragmentation, because any free block fits.",
        tuple(Query(f'quire_kv_slots{{{OF_ENGINE},kind="{kind}"}}', f"{{{{engine}}}} {kind}") for kind in SLOTS),
        stacked=SLOTS,
    ),
    Panel(
        "Share of slots with tokens",
        "Computed tokens of all slots in held blocks. The next panel shows the rest.",
        (Query(f"quire_kv_held_tokens{{{OF_ENGINE}}} / (quire_kv_held_slots{{{OF_ENGINE}}} > 0)", "{{engine}}"),),
        unit="percentunit",
        maximum=1,
    ),
    Panel(
        "Share of slots without tokens",
        "By use: reserved, lookahead and internal sum to the waste.",
        (
            Query(
                f'quire_kv_slots{{{OF_ENGINE},kind!="tokens"}} / on ({BY_RELEASE}, model_name, engine) group_left() '
                f"(quire_kv_held_slots{{{OF_ENGINE}}} > 0)",
                "{{engine}} {{kind}}",
            ),
        ),
        unit="percentunit",
        maximum=1,
    ),
)
_SHARING = (
    Panel(
        "Sharing",
        "Saved: blocks that would be needed in addition without sharing. Shared: blocks with several holders. Of kind "
        "all.",
        (
            Query(f"quire_kv_saved_blocks{{{OF_ENGINE}}}", "{{engine}} saved"),
            Query(f"quire_kv_shared_blocks{{{OF_ENGINE}}}", "{{engine}} shared"),
        ),
    ),
    Panel(
        "Blocks needed without sharing",
        "As a multiple of those held: 2 means that half of the memory is saved.",
        (
            Query(
                ratio(f"({_HELD} + sum by ({BY_RELEASE}, engine) (quire_kv_saved_blocks{{{OF_ENGINE}}}))", _HELD),
                "{{engine}}",
            ),
        ),
    ),
    Panel(
        "Pinned blocks",
        "Blocks of kind all that are held by pins. Other prompts cannot evict them.",
        (Query(f"quire_kv_pinned_blocks{{{OF_ENGINE}}}", "{{engine}}"),),
    ),
    PREFIX_CACHE_HIT_RATE,
    Panel(
        "Prompt tokens",
        "Computed, or prefix cache hits.",
        (Query(rate("quire_prompt_tokens_by_source_total", "engine, source"), "{{engine}} {{source}}"),),
        unit="tokens/s",
    ),
    Panel(
        "Cached tokens, expected and hit",
        "Expected: by the gateway at routing. If more is expected than hit, blocks are evicted before their "
        "requests start.",
        (
            Query(rate("quire_routed_cached_tokens_total"), "{{engine}} expected"),
            Query(rate("quire_prompt_tokens_cached_total"), "{{engine}} hit"),
        ),
        unit="tokens/s",
    ),
)
_PREEMPTION = (
    PREEMPTIONS,
    Panel(
        "Cost of preemptions",
        "Recomputed tokens per second, and tokens moved to host memory instead.",
        (
            Query(rate("quire_recomputed_tokens_total"), "{{engine}} recomputed"),
            Query(rate("quire_swapped_tokens_total"), "{{engine}} swapped"),
        ),
        unit="tokens/s",
    ),
    Panel(
        "Share of recomputed tokens",
        "Of all tokens that the engine computes.",
        (Query(ratio(rate("quire_recomputed_tokens_total"), _COMPUTED), "{{engine}}"),),
        unit="percentunit",
        warn=0.02,
        alarm=0.1,
    ),
)
_LIVES = (
    Panel(
        "Block lifetime",
        "From one grant of a block to the next, of a sample of blocks.",
        quantiles("quire_kv_block_lifetime_seconds"),
        unit="s",
    ),
    Panel(
        "Idle time before eviction",
        "Since the block's last grant or hit. If it is nearly the lifetime, caching these blocks gained little.",
        quantiles("quire_kv_block_idle_before_evict_seconds"),
        unit="s",
    ),
    Panel(
        "Reuse gap",
        "Between two hits of a block. If it comes near the lifetime, a larger pool would give more hits.",
        quantiles("quire_kv_block_reuse_gap_seconds"),
        unit="s",
    ),
)
_TENANTS = (
    Panel(
        "Tokens in flight",
        "Prompt and answer tokens of running requests: what each tenant would hold of the pools without sharing. "
        "Without API keys there is one tenant without a name.",
        (Query(f"sum by ({BY_RELEASE}, tenant) (quire_tenant_running_tokens{{{OF_TENANT}}})", "{{tenant}}"),),
    ),
    Panel(
        "Prefix cache hit rate by tenant",
        "Tenants do not hit each other's prompts, unless prefixes are public.",
        (Query(ratio(_of_tenant("cached"), f"{_of_tenant('cached')} + {_of_tenant('computed')}"), "{{tenant}}"),),
        unit="percentunit",
        maximum=1,
    ),
    Panel(
        "Recomputed tokens by tenant",
        "Cost of preemptions, counted when a request ends.",
        (Query(_of_tenant("recomputed"), "{{tenant}}"),),
        unit="tokens/s",
    ),
    Panel(
        "Tokens computed by tenant",
        "Prompt and answer tokens.",
        (
            Query(_of_tenant("computed"), "{{tenant}} prompt"),
            Query(_of_tenant("generated"), "{{tenant}} answer"),
        ),
        unit="tokens/s",
    ),
    Panel(
        "Requests by tenant",
        "In flight.",
        (Query(f"sum by ({BY_RELEASE}, tenant) (quire_tenant_requests_running{{{OF_TENANT}}})", "{{tenant}}"),),
    ),
    Panel(
        "Requests over a tenant's limit",
        "Rejected requests per second.",
        (
            Query(
                rate("quire_tenant_rejections_total", "tenant", f'{OF_RELEASE},tenant=~"$tenant"'),
                "{{tenant}}",
            ),
        ),
        unit="/s",
    ),
)
_BOOKS = (
    Panel(
        "Refused block operations",
        "Items of block steps that the KV manager refused, per second. out_of_blocks means a full pool, pin_too_large "
        "an operator's pin; all others are faults.",
        (Query(rate("quire_kv_refusals_total", "engine, reason"), "{{engine}} {{reason}}"),),
        unit="/s",
    ),
    Panel(
        "Audits",
        "Finished audits per second, and violations since the pool was attached.",
        (
            Query(rate("quire_kv_audits_total"), "{{engine}} audits a second"),
            Query(f"quire_kv_audit_violations_total{{{OF_ENGINE}}}", "{{engine}} faults"),
        ),
    ),
    Panel(
        "Compared blocks",
        "Blocks compared with their checksums per second, by reason, and those that were wrong since the engine's "
        "start. Wrong ones are withdrawn and computed again.",
        (
            Query(rate("quire_kv_compared_blocks_total", "engine, reason"), "{{engine}} {{reason}} a second"),
            Query(f"sum by ({BY_RELEASE}, engine) (quire_kv_wrong_blocks_total{{{OF_ENGINE}}})", "{{engine}} wrong"),
        ),
    ),
    Panel(
        "Streams of engines",
        "1 while the engine's stream is connected, 0 while the lease of a broken one runs; attached: number of "
        "attachments.",
        (
            Query(f"quire_kv_pool_connected{{{OF_ENGINE}}}", "{{engine}} connected"),
            Query(f"quire_kv_sessions_total{{{OF_ENGINE}}}", "{{engine}} attached"),
        ),
    ),
    Panel(
        "Latency of the KV manager's block steps",
        "Reading, applying and answering one block step.",
        quantiles("quire_kv_step_seconds"),
        unit="s",
    ),
    Panel(
        "Step latency of the engine",
        "Model and sampling of one step.",
        quantiles("quire_step_seconds"),
        unit="s",
    ),
    Panel(
        "Sequences",
        "Sequences with a block table.",
        (Query(f"quire_kv_sequences{{{OF_ENGINE}}}", "{{engine}}"),),
    ),
)

BLOCK_UTILIZATION = Board(
    "Block utilization",
    "How the blocks of the KV cache are used, and what their management costs, by engine and tenant.",
    ("model_name", "engine", "tenant"),
    (
        Row("Pool", _POOL),
        Row("Waste", _WASTE),
        Row("Sharing", _SHARING),
        Row("Block lifetimes", _LIVES),
        Row("Preemption", _PREEMPTION),
        Row("Tenants", _TENANTS),
        Row("Bookkeeping", _BOOKS),
        Row("KV events", (KV_EVENTS, SUBSCRIBERS, MISSED_EVENTS, REPLAYS)),
    ),
)
