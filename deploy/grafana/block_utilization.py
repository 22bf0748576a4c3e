"""The dashboard "Block utilization": what the pool's blocks are used for, and what managing them costs."""

from deploy.grafana.engine_panels import HELD_SHARE, PREEMPTIONS, PREFIX_CACHE_HIT_RATE
from deploy.grafana.panels import (
    OF_ENGINE,
    OF_TENANT,
    RATE,
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

_HELD = f'quire_kv_blocks{{{OF_ENGINE},tier="device",state="held"}}'
_COMPUTED = (
    f"{rate('quire_prompt_tokens_total')} - {rate('quire_prompt_tokens_cached_total')} + "
    f"{rate('quire_generation_tokens_total')} + {rate('quire_recomputed_tokens_total')}"
)


def _of_tenant(kind: str) -> str:
    return f'sum by (tenant) (rate(quire_tenant_tokens_total{{{OF_TENANT},kind="{kind}"}}{RATE}))'


_POOL = (
    Panel(
        "Blocks by state",
        "Every block of the pool is in one state. Held: a running request needs it. Cached: nobody holds it, but a "
        "prompt with the same beginning can. Free: empty. Withheld: taken out by the audit.",
        tuple(
            Query(f'quire_kv_blocks{{{OF_ENGINE},tier="device",state="{state}"}}', f"{{{{engine}}}} {state}")
            for state in STATES
        ),
        stacked=STATES,
    ),
    HELD_SHARE,
    Panel(
        "Blocks granted, evicted and copied",
        "Evicted: cached blocks whose contents were given up for space. Copied: shared blocks before they were "
        "written to.",
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
        "Where the engine has host memory: blocks of swapped requests are held, those that the pool had no room "
        "for are cached.",
        tuple(
            Query(f'quire_kv_blocks{{{OF_ENGINE},tier="host",state="{state}"}}', f"{{{{engine}}}} {state}")
            for state in STATES
        ),
        stacked=STATES,
    ),
    Panel(
        "Blocks moved between the tiers",
        "To the host by swaps and instead of being forgotten, and back to the device.",
        (Query(rate("quire_kv_moved_blocks_total", "engine, to"), "{{engine}} to {{to}}"),),
        unit="/s",
    ),
)
_WASTE = (
    Panel(
        "Slots of held blocks",
        "What held blocks have room for, by kind: tokens computed, reserved for the running prefill, blocks granted "
        "ahead, and what is left in blocks that are begun. There is no external fragmentation: any free block will do.",
        tuple(Query(f'quire_kv_slots{{{OF_ENGINE},kind="{kind}"}}', f"{{{{engine}}}} {kind}") for kind in SLOTS),
        stacked=SLOTS,
    ),
    Panel(
        "Share of slots holding tokens",
        "Tokens that held blocks contain, of those that they could. The rest is the panel beside this one.",
        (Query(f"quire_kv_held_tokens{{{OF_ENGINE}}} / (quire_kv_held_slots{{{OF_ENGINE}}} > 0)", "{{engine}}"),),
        unit="percentunit",
        most=1,
    ),
    Panel(
        "Share of slots without a token",
        "By kind: reserved, lookahead and internal add up to the waste.",
        (
            Query(
                f'quire_kv_slots{{{OF_ENGINE},kind!="tokens"}} / on (model_name, engine) group_left() '
                f"(quire_kv_held_slots{{{OF_ENGINE}}} > 0)",
                "{{engine}} {{kind}}",
            ),
        ),
        unit="percentunit",
        most=1,
    ),
)
_SHARING = (
    Panel(
        "Sharing",
        "Saved: blocks that would be needed in addition if nothing were shared. Shared: blocks held more than once.",
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
                f"(sum by (engine) ({_HELD}) + sum by (engine) (quire_kv_saved_blocks{{{OF_ENGINE}}})) / "
                f"(sum by (engine) ({_HELD}) > 0)",
                "{{engine}}",
            ),
        ),
    ),
    Panel(
        "Pinned blocks",
        "Held by pins, whoever else holds them: they are not there for others.",
        (Query(f"quire_kv_pinned_blocks{{{OF_ENGINE}}}", "{{engine}}"),),
    ),
    PREFIX_CACHE_HIT_RATE,
    Panel(
        "Prompt tokens",
        "Computed, or found in the cache and not computed.",
        (Query(rate("quire_prompt_tokens_by_source_total", "engine, source"), "{{engine}} {{source}}"),),
        unit="tokens/s",
    ),
    Panel(
        "Cached tokens, expected and found",
        "Expected: by the gateway, when it chose the engine. Where more is expected than found, blocks are evicted "
        "before their requests begin.",
        (
            Query(rate("quire_routed_cached_tokens_total"), "{{engine}} expected"),
            Query(rate("quire_prompt_tokens_cached_total"), "{{engine}} found"),
        ),
        unit="tokens/s",
    ),
)
_PREEMPTION = (
    PREEMPTIONS,
    Panel(
        "What preemptions cost",
        "Tokens computed again, and tokens moved to host memory instead.",
        (
            Query(rate("quire_recomputed_tokens_total"), "{{engine}} computed again"),
            Query(rate("quire_swapped_tokens_total"), "{{engine}} swapped"),
        ),
        unit="tokens/s",
    ),
    Panel(
        "Share of tokens computed again",
        "Of all tokens that the engine computes.",
        (Query(ratio(rate("quire_recomputed_tokens_total"), _COMPUTED), "{{engine}}"),),
        unit="percentunit",
        warn=0.02,
        alarm=0.1,
    ),
)
_LIVES = (
    Panel(
        "How long blocks live",
        "From when a block is handed out until it is handed out again, of a sample of blocks.",
        quantiles("quire_kv_block_lifetime_seconds"),
        unit="s",
    ),
    Panel(
        "Idle at the end of their lives",
        "Since a block was last handed out or found in the prefix cache. Where it is hardly shorter than the lives, "
        "blocks are kept for nothing.",
        quantiles("quire_kv_block_idle_before_evict_seconds"),
        unit="s",
    ),
    Panel(
        "Found again after",
        "Between two times that a block was found. Where it comes near the length of the lives, a larger pool would be "
        "hit more.",
        quantiles("quire_kv_block_reuse_gap_seconds"),
        unit="s",
    ),
)
_TENANTS = (
    Panel(
        "Tokens under way",
        "Of prompts and answers of running requests: what each tenant would hold of the pools if nothing were shared. "
        "Without API keys there is one tenant, without a name.",
        (Query(f"sum by (tenant) (quire_tenant_running_tokens{{{OF_TENANT}}})", "{{tenant}}"),),
    ),
    Panel(
        "Share of prompt tokens found in the cache",
        "By tenant: no tenant finds another's prompts, unless prefixes are public.",
        (Query(ratio(_of_tenant("cached"), f"{_of_tenant('cached')} + {_of_tenant('computed')}"), "{{tenant}}"),),
        unit="percentunit",
        most=1,
    ),
    Panel(
        "Tokens computed again by tenant",
        "Who pays for preemptions. They are counted when a request ends.",
        (Query(_of_tenant("recomputed"), "{{tenant}}"),),
        unit="tokens/s",
    ),
    Panel(
        "Tokens computed by tenant",
        "Of prompts and of answers.",
        (
            Query(_of_tenant("computed"), "{{tenant}} prompt"),
            Query(_of_tenant("generated"), "{{tenant}} answer"),
        ),
        unit="tokens/s",
    ),
    Panel(
        "Requests by tenant",
        "Under way.",
        (Query(f"sum by (tenant) (quire_tenant_requests_running{{{OF_TENANT}}})", "{{tenant}}"),),
    ),
    Panel(
        "Requests over a tenant's limit",
        "Refused, a second.",
        (
            Query(
                f'sum by (tenant) (rate(quire_tenant_rejections_total{{tenant=~"$tenant"}}{RATE}))',
                "{{tenant}}",
            ),
        ),
        unit="/s",
    ),
)
_BOOKS = (
    Panel(
        "Refused block operations",
        "Items of an engine's Steps that the KV manager refused, a second. out_of_blocks is how a full pool says so, "
        "pin_too_large is an operator's; anything else is a fault.",
        (Query(rate("quire_kv_refusals_total", "engine, reason"), "{{engine}} {{reason}}"),),
        unit="/s",
    ),
    Panel(
        "Audits",
        "Those that came to their end, a second, and the faults that they have found since the pool was attached.",
        (
            Query(rate("quire_kv_audits_total"), "{{engine}} audits a second"),
            Query(f"quire_kv_audit_violations_total{{{OF_ENGINE}}}", "{{engine}} faults"),
        ),
    ),
    Panel(
        "Streams of engines",
        "1 while the engine's stream is there, 0 while the lease of a broken one runs; attached: so often by now.",
        (
            Query(f"quire_kv_pool_connected{{{OF_ENGINE}}}", "{{engine}} connected"),
            Query(f"quire_kv_sessions_total{{{OF_ENGINE}}}", "{{engine}} attached"),
        ),
    ),
    Panel(
        "Step latency of the KV manager",
        "Reading, applying and answering the block operations of one step.",
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
        "With a block table.",
        (Query(f"quire_kv_sequences{{{OF_ENGINE}}}", "{{engine}}"),),
    ),
)

BLOCK_UTILIZATION = Board(
    "Block utilization",
    "What the blocks of the KV cache are used for, and what managing them costs, by engine and by tenant.",
    ("model_name", "engine", "tenant"),
    (
        Row("Pool", _POOL),
        Row("Waste", _WASTE),
        Row("Sharing", _SHARING),
        Row("Lives of blocks", _LIVES),
        Row("Preemption", _PREEMPTION),
        Row("Tenants", _TENANTS),
        Row("The books", _BOOKS),
    ),
)
