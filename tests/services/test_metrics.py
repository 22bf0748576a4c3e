"""Metrics of the services after known loads."""

import platform
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.faults import wait_until
from tests.load import SLOW_SEED, prompt_request, run_streams, slow_request
from tests.running_quire import CALL_SECONDS, Answer, RunningQuire
from tests.scrape import Scrape

# Tokens. The pool of the running Quire holds no more of one request.
LONG = 900
LABELS = {"model_name": "tiny-llama", "engine": platform.node()}

# The names are an interface for dashboards and autoscalers. The labels are those beyond LABELS.
SHOWN = {
    "gateway": {
        "quire_time_to_first_token_seconds": (),
        "quire_inter_token_latency_seconds": (),
        "quire_e2e_request_latency_seconds": (),
        "quire_request_success": ("finished_reason",),
        "quire_routed_requests": ("reason",),
        "quire_routed_cached_tokens": (),
        "quire_failovers": ("reason",),
        "quire_isolated_attempts": (),
        "quire_requests_given_up": (),
        "quire_usable_engines": (),
        "quire_cancel_to_free_seconds": (),
        "quire_request_queue_time_seconds": (),
        "quire_request_prefill_time_seconds": (),
        "quire_request_decode_time_seconds": (),
        "quire_request_inference_time_seconds": (),
        "quire_request_time_per_output_token_seconds": (),
        "quire_request_prompt_tokens": (),
        "quire_request_generation_tokens": (),
        "quire_request_max_num_generation_tokens": (),
        "quire_request_params_max_tokens": (),
        "quire_request_params_n": (),
        "quire_request_prefill_kv_computed_tokens": (),
        "quire_open_streams": ("protocol",),
        "quire_admission_rejections": ("reason",),
        "quire_deadline_exceeded": ("phase",),
        "quire_slow_clients": (),
        "quire_tool_calls": ("dialect",),
        "quire_tool_call_parse_failures": ("dialect", "kind"),
        "quire_invalid_requests": ("field",),
        "quire_http_requests": ("route", "method", "status"),
        "quire_tenant_requests": ("tenant",),
        "quire_tenant_requests_running": ("tenant",),
        "quire_tenant_running_tokens": ("tenant",),
        "quire_tenant_tokens": ("tenant", "kind"),
        "quire_tenant_rejections": ("tenant",),
    },
    "engine": {
        "quire_num_requests_running": (),
        "quire_recording_failed": ("steps",),
        "quire_model_formats_info": ("dtype", "weights", "kv_dtype"),
        "quire_kept_blocks": ("tier",),
        "quire_kept_blocks_adopted": ("tier",),
        "quire_kept_blocks_lost": ("tier",),
        "quire_kept_memory_refused": ("difference",),
        "quire_kept_seals_broken": (),
        "quire_kept_blocks_unannounced": (),
        "quire_kv_compared_blocks": ("reason",),
        "quire_kv_wrong_blocks": ("reason",),
        "quire_kv_checksum_seconds": (),
        "quire_num_requests_waiting": (),
        "quire_num_requests_waiting_by_reason": ("reason",),
        "quire_seconds_without_step": (),
        "quire_num_preemptions": (),
        "quire_num_requests_failed": ("reason",),
        "quire_prompt_tokens": (),
        "quire_prompt_tokens_cached": (),
        "quire_prompt_tokens_by_source": ("source",),
        "quire_generation_tokens": (),
        "quire_num_limited_prefill_steps": (),
        "quire_num_sequences_planned": (),
        "quire_num_sequences_left_out": (),
        "quire_num_sequences_ahead": (),
        "quire_num_sequences_sat_out": (),
        "quire_spec_decode_num_drafts": (),
        "quire_spec_decode_num_draft_tokens": (),
        "quire_spec_decode_num_accepted_tokens": (),
        "quire_spec_decode_num_declined_tokens": (),
        "quire_spec_decode_num_requests_excluded": ("reason",),
        "quire_recomputed_tokens": (),
        "quire_swapped_tokens": (),
        "quire_kv_sessions": (),
        "quire_smg_calls": (),
        "quire_smg_subscribers": (),
        "quire_smg_event_batches": (),
        "quire_smg_snapshots": (),
        "quire_smg_catch_ups": (),
        "quire_rank_seconds_behind": ("rank",),
        "quire_rank_wait_seconds": (),
        "quire_rank_plans": (),
        "quire_rank_plan_bytes": (),
        "quire_kv_events_announced_blocks": (),
        "quire_kv_events_history_batches": (),
        "quire_kv_events_history_seconds": (),
        "quire_kv_events_connections": ("socket",),
        "quire_kv_events_batches": (),
        "quire_kv_events_blocks": ("change",),
        "quire_kv_events_clears": (),
        "quire_kv_events_overflows": (),
        "quire_kv_events_refused_connections": ("socket",),
        "quire_kv_events_ended_connections": ("socket",),
        "quire_kv_events_replay_requests": ("outcome",),
        "quire_kv_events_replayed_batches": (),
        "quire_step_seconds": (),
        "quire_step_phase_seconds": ("phase",),
        "quire_iteration_tokens_total": (),
    },
    "kvmanager": {
        "quire_cache_config_info": ("block_size", "num_gpu_blocks", "num_cpu_blocks"),
        "quire_kv_blocks": ("kind", "tier", "state"),
        "quire_kv_pool_blocks": ("kind", "tier"),
        "quire_kv_cache_usage_perc": (),
        "quire_kv_held_tokens": (),
        "quire_kv_held_slots": (),
        "quire_kv_slots": ("kind",),
        "quire_kv_shared_blocks": (),
        "quire_kv_saved_blocks": (),
        "quire_kv_pinned_blocks": (),
        "quire_kv_pool_connected": (),
        "quire_kv_sequences": (),
        "quire_prefix_cache_queries": (),
        "quire_prefix_cache_hits": (),
        "quire_kv_granted_blocks": (),
        "quire_kv_evicted_blocks": (),
        "quire_kv_copied_blocks": (),
        "quire_kv_moved_blocks": ("to",),
        "quire_kv_refusals": ("reason",),
        "quire_kv_audits": (),
        "quire_kv_audit_violations": (),
        "quire_kv_condemned_blocks": ("tier", "reason"),
        "quire_kv_attaches": (),
        "quire_kv_broken_streams": (),
        "quire_kv_expired_leases": (),
        "quire_kv_step_seconds": (),
        "quire_kv_block_lifetime_seconds": (),
        "quire_kv_block_idle_before_evict_seconds": (),
        "quire_kv_block_reuse_gap_seconds": (),
    },
}


# Without the label `engine`: these series outlive an engine, or count requests that no engine has begun.
OUTLIVING = {
    "quire_requests_given_up",
    *("quire_kv_attaches", "quire_kv_broken_streams", "quire_kv_expired_leases"),
    *(
        "quire_admission_rejections",
        "quire_deadline_exceeded",
        "quire_invalid_requests",
        "quire_slow_clients",
        "quire_open_streams",
        *("quire_tool_calls", "quire_tool_call_parse_failures"),
        "quire_usable_engines",
    ),
    *("quire_tenant_requests", "quire_tenant_requests_running", "quire_tenant_running_tokens", "quire_tenant_tokens"),
}
# Without the label `model_name` too: a request is counted before its model is resolved.
OF_NO_MODEL = {"quire_http_requests", "quire_tenant_rejections"}
# Of each process, without labels.
OF_EVERY_SERVICE = {"quire_log_lines_dropped"}
# Of each service that has certificates.
OF_TLS = {"quire_tls_certificate_expiry_timestamp_seconds"}


def scrape(quire: RunningQuire, service: str) -> Scrape:
    return Scrape.of(quire.metrics_urls[service])


def quiet(quire: RunningQuire) -> None:
    """Wait until neither the pool nor the gateway has a request."""
    wait_until(lambda: sum(open_streams(quire).values()) == 0, "no stream is open", CALL_SECONDS)
    assert quire.settled_pool().sequences == 0


def open_streams(quire: RunningQuire) -> dict[str, float]:
    return {"grpc": 0.0, "http": 0.0} | scrape(quire, "gateway").values("quire_open_streams", "protocol")


def quiet_with_series(quire: RunningQuire) -> None:
    """Run a request, so that all series exist, and wait for its end."""
    quire.generate(prompt_request("Once", 1))
    quiet(quire)


def difference(name: str, before: Scrape, after: Scrape, **labels: str) -> float:
    return after.value(name, **labels) - before.value(name, **labels)


@pytest.mark.parametrize("service", SHOWN)
def test_each_service_exports_its_metrics_with_their_labels(tiny_quire: RunningQuire, service: str) -> None:
    tiny_quire.generate(prompt_request("Once", 2))
    httpx.get(f"{tiny_quire.http_url}/health", timeout=CALL_SECONDS)
    families = scrape(tiny_quire, service).families
    shown = {name for name in families if name.startswith(("quire_", "vllm:"))}
    assert shown == SHOWN[service].keys() | OF_EVERY_SERVICE
    for name, labels in SHOWN[service].items():
        assert families[name].documentation
        for sample in families[name].samples:
            common = {} if name in OF_NO_MODEL else LABELS
            common = {label: value for label, value in common.items() if name not in OUTLIVING or label != "engine"}
            assert sample.labels.items() >= common.items(), name
            assert sample.labels.keys() - {"le"} == {*common, *labels}, name


@pytest.mark.parametrize("service", SHOWN)
def test_each_process_exports_its_memory_and_no_creation_times(tiny_quire: RunningQuire, service: str) -> None:
    shown = scrape(tiny_quire, service)
    assert shown.value("process_resident_memory_bytes") > 1e6
    assert [sample.name for sample in shown.samples if sample.name.endswith("_created")] == []


def test_token_metrics_equal_the_tokens_that_clients_received(tiny_quire: RunningQuire) -> None:
    quiet_with_series(tiny_quire)
    before = {service: scrape(tiny_quire, service) for service in SHOWN}
    prompt = "the same beginning of some length, so that whole blocks of it can be shared, and then number "
    waits: list[float] = []

    def answer(number: int) -> Answer:
        begun = time.monotonic()
        answer = tiny_quire.generate(prompt_request(f"{prompt}{number}", 9))
        waits.append(time.monotonic() - begun)
        return answer

    with ThreadPoolExecutor(6) as clients:
        answers = [*map(answer, range(2)), *clients.map(answer, range(2, 8))]
    quiet(tiny_quire)
    after = {service: scrape(tiny_quire, service) for service in SHOWN}

    usages = [answer.finished.usage for answer in answers]
    assert sum(usage.cached_tokens for usage in usages) > 0
    engine = before["engine"], after["engine"]
    assert difference("quire_prompt_tokens_total", *engine) == sum(usage.prompt_tokens for usage in usages)
    assert difference("quire_prompt_tokens_cached_total", *engine) == sum(usage.cached_tokens for usage in usages)
    assert difference("quire_generation_tokens_total", *engine) == 8 * 9
    sources = [now["engine"].values("quire_prompt_tokens_by_source_total", "source") for now in (before, after)]
    added = {source: sources[1][source] - sources[0][source] for source in sources[1]}
    cached = sum(usage.cached_tokens for usage in usages)
    assert added == {"local_cache_hit": cached, "local_compute": sum(one.prompt_tokens for one in usages) - cached}
    assert difference("quire_step_seconds_count", *engine) >= 9
    gateway = before["gateway"], after["gateway"]
    assert difference("quire_time_to_first_token_seconds_count", *gateway) == 8
    assert difference("quire_inter_token_latency_seconds_count", *gateway) == 8 * (9 - 1)
    assert difference("quire_e2e_request_latency_seconds_count", *gateway) == 8
    assert difference("quire_request_success_total", *gateway, finished_reason="length") == 8
    of_each = {
        "quire_request_prompt_tokens": sum(usage.prompt_tokens for usage in usages),
        "quire_request_prefill_kv_computed_tokens": sum(one.prompt_tokens - one.cached_tokens for one in usages),
        "quire_request_generation_tokens": 8 * 9,
        "quire_request_max_num_generation_tokens": 8 * 9,
        "quire_request_params_max_tokens": 8 * 9,
        "quire_request_params_n": 8,
        "quire_request_queue_time_seconds": seconds(answers, "queued"),
        "quire_request_prefill_time_seconds": seconds(answers, "prefill"),
        "quire_request_decode_time_seconds": seconds(answers, "decode"),
        "quire_request_inference_time_seconds": seconds(answers, "prefill") + seconds(answers, "decode"),
        "quire_request_time_per_output_token_seconds": seconds(answers, "decode") / (9 - 1),
    }
    for name, total in of_each.items():
        assert difference(f"{name}_count", *gateway) == 8, name
        assert difference(f"{name}_sum", *gateway) == pytest.approx(total), name
    assert difference("quire_iteration_tokens_total_sum", *engine) >= 8 * (9 - 1)
    waited = sum(answer.finished.timing.time_to_first_token.ToTimedelta().total_seconds() for answer in answers)
    total = sum(answer.finished.timing.total.ToTimedelta().total_seconds() for answer in answers)
    first_token = difference("quire_time_to_first_token_seconds_sum", *gateway)
    end_to_end = difference("quire_e2e_request_latency_seconds_sum", *gateway)
    rounding = 1e-4
    # The engine's times end at its report, and the client's time is the longest.
    assert waited - rounding <= first_token <= end_to_end
    assert total - rounding <= end_to_end <= sum(waits)


def seconds(answers: list[Answer], part: str) -> float:
    return sum(getattr(answer.finished.timing, part).ToTimedelta().total_seconds() for answer in answers)


def test_the_phases_of_steps_add_up_to_the_engines_busy_time(tiny_quire: RunningQuire) -> None:
    tiny_quire.generate(prompt_request("warm", 2))
    quiet(tiny_quire)
    begun = time.monotonic()
    before = scrape(tiny_quire, "engine")
    tiny_quire.generate(prompt_request("a longer answer", 200))
    quiet(tiny_quire)  # a step is counted after its tokens were sent, and before the blocks are freed
    after, elapsed = scrape(tiny_quire, "engine"), time.monotonic() - begun
    steps = difference("quire_step_seconds_count", before, after)
    spent = {}
    for phase in ("plan", "wait", "forward", "sample", "publish"):
        assert difference("quire_step_phase_seconds_count", before, after, phase=phase) == steps >= 200
        spent[phase] = difference("quire_step_phase_seconds_sum", before, after, phase=phase)
    ran = difference("quire_step_seconds_sum", before, after)
    assert spent["forward"] + spent["sample"] == pytest.approx(ran)
    assert min(spent["plan"], spent["forward"], spent["sample"], spent["publish"]) > 0
    assert sum(spent.values()) <= elapsed


def test_open_streams_are_counted_by_protocol(tiny_quire: RunningQuire) -> None:
    body = {"prompt": "over HTTP", "max_tokens": LONG, "stream": True, "ignore_eos": True, "seed": SLOW_SEED}
    quiet(tiny_quire)
    call = tiny_quire.gateway.Generate(slow_request("over gRPC", LONG))
    next(call)
    with httpx.stream("POST", f"{tiny_quire.http_url}/v1/completions", json=body, timeout=CALL_SECONDS) as response:
        assert response.status_code == 200, response.read()
        assert open_streams(tiny_quire) == {"grpc": 1, "http": 1}
        call.cancel()
    quiet(tiny_quire)


def test_metrics_of_the_kv_manager_equal_the_answer_of_get_pool(tiny_quire: RunningQuire) -> None:
    run_streams(tiny_quire, [prompt_request(f"prompt number {number}", 5) for number in range(12)], 6)

    quiet(tiny_quire)
    pool, shown = tiny_quire.pool(), scrape(tiny_quire, "kvmanager")
    states = shown.values("quire_kv_blocks", "state", tier="device")
    assert states == {"free": pool.device.free, "cached": pool.device.cached, "held": 0, "withheld": 0}
    assert states["cached"] > 0
    assert sum(states.values()) == shown.value("quire_kv_pool_blocks", tier="device") == 64
    assert shown.value("quire_prefix_cache_queries_total") == pool.totals.prefix_query_tokens
    assert shown.value("quire_prefix_cache_hits_total") == pool.totals.prefix_hit_tokens
    assert shown.value("quire_kv_granted_blocks_total") == pool.totals.granted_blocks
    assert shown.value("quire_kv_evicted_blocks_total") == pool.totals.evicted_blocks
    assert shown.value("quire_kv_step_seconds_count") == pool.totals.steps
    reasons = shown.values("quire_kv_refusals_total", "reason")
    assert reasons.keys() == {"out_of_blocks", "unknown", "already_exists", "invalid", "pin_too_large"}
    assert sum(reasons.values()) == pool.totals.refusals
    assert pool.model == "tiny-llama"


def test_blocks_and_tokens_of_running_requests_are_exported_as_held(tiny_quire: RunningQuire) -> None:
    quiet(tiny_quire)
    call = tiny_quire.gateway.Generate(slow_request("a prompt that is a little longer than one block", LONG))
    tokens = 0
    while tokens < 6:  # then the manager has received some of their commits
        tokens += len(next(call).delta.token_ids)
    engine, manager = scrape(tiny_quire, "engine"), scrape(tiny_quire, "kvmanager")
    call.cancel()
    quiet(tiny_quire)
    assert engine.value("quire_num_requests_running") == 1
    assert engine.value("quire_num_requests_waiting") == 0
    assert engine.values("quire_num_requests_waiting_by_reason", "reason") == {"capacity": 0, "deferred": 0}
    held = manager.value("quire_kv_blocks", tier="device", state="held")
    assert held > 0
    assert manager.value("quire_kv_cache_usage_perc") == pytest.approx(held / 64)
    assert manager.value("quire_kv_held_slots") == held * 16
    assert 0 < manager.value("quire_kv_held_tokens") <= held * 16
    assert manager.value("quire_kv_sequences") == 1


def test_a_full_pool_exports_evictions_preemptions_and_recomputed_tokens(tiny_quire: RunningQuire) -> None:
    totals = tiny_quire.settled_pool().totals
    before = {service: scrape(tiny_quire, service) for service in ("engine", "kvmanager")}
    fast = [prompt_request(f"one of many, {number}", 120) for number in range(12)]
    answers = run_streams(tiny_quire, [slow_request("While it runs, all run", 100), *fast], 13)
    pool = tiny_quire.settled_pool()
    engine, manager = ((before[service], scrape(tiny_quire, service)) for service in before)
    preemptions = sum(answer.finished.timing.preemptions for answer in answers)
    recomputed = sum(answer.finished.usage.recomputed_tokens for answer in answers)
    assert difference("quire_num_preemptions_total", *engine) == preemptions > 0
    assert preemptions == pool.totals.preemptions - totals.preemptions
    assert difference("quire_recomputed_tokens_total", *engine) == recomputed > 0
    evicted = pool.totals.evicted_blocks - totals.evicted_blocks
    assert difference("quire_kv_evicted_blocks_total", *manager) == evicted > 0
