"""Limits of tenants with a manual clock, and their namespaces."""

import random
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest

from quire.v1 import gateway_pb2
from quire.v1.decoding_pb2 import GenerationDefaults
from services.gateway.access.api_keys import TenantLimits
from services.gateway.access.callers import ANONYMOUS, Caller
from services.gateway.access.namespace import Namespace, qualified
from services.gateway.access.tenants import Reservation, Tenants
from services.gateway.access.token_bound import Sequences, sequences_of, token_upper_bound
from services.runtime.errors import InvalidField, Overloaded

ACME, OTHER = Caller("acme", operator=False), Caller("other", operator=False)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def limited(clock: Clock, max_requests: int | None = None, tokens: int | None = None) -> Tenants:
    tenants = Tenants(clock)
    tenants.set_limits({"acme": TenantLimits(max_requests, tokens)})
    return tenants


def taken(tenants: Tenants, tokens: int = 1, caller: Caller = ACME) -> AbstractContextManager[Reservation]:
    return tenants.admitted(caller, tokens)


def retry_seconds(tenants: Tenants, tokens: int = 1) -> float | None:
    with pytest.raises(Overloaded) as caught, tenants.admitted(ACME, tokens):
        pass
    return caught.value.retry_seconds


@pytest.mark.parametrize(
    ("fields", "sequences"),
    [
        ({}, Sequences(1, "sampling.sample_count")),
        ({"sampling": {"sample_count": 5}}, Sequences(5, "sampling.sample_count")),
        ({"sampling": {"sample_count": 2}, "beam_search": {"width": 7}}, Sequences(7, "beam_search.width")),
        ({"sampling": {"sample_count": -1}}, Sequences(1, "sampling.sample_count")),
    ],
)
def test_sequences_are_samples_or_beams(fields: dict[str, Any], sequences: Sequences) -> None:
    assert sequences_of(gateway_pb2.GenerateRequest(**fields)) == sequences


def test_samples_and_beams_count_against_the_limit_of_requests(clock: Clock) -> None:
    tenants, beams = limited(clock, max_requests=4), Sequences(2, "beam_search.width")
    with tenants.admitted(ACME, 1, Sequences(3, "sampling.sample_count")):
        with pytest.raises(Overloaded, match=r"3 sequences .* limit is 4, and this request has 2 \(beam_search.width"):
            tenants.admitted(ACME, 1, beams).__enter__()
        with taken(tenants), pytest.raises(Overloaded, match="4 sequences"), taken(tenants):
            pass
    with tenants.admitted(ACME, 1, beams), tenants.admitted(ACME, 1, beams):
        pass


def test_a_request_with_more_sequences_than_the_tenants_limit_is_invalid(clock: Clock) -> None:
    tenants = limited(clock, max_requests=4)
    with pytest.raises(
        InvalidField, match="sample_count must be at most 4, the limit of tenant 'acme', not 5"
    ) as refusal:
        tenants.admitted(ACME, 1, Sequences(5, "sampling.sample_count")).__enter__()
    assert refusal.value.field == "sampling.sample_count"


def test_the_limit_of_requests_in_flight_applies_to_one_tenant_only(clock: Clock) -> None:
    tenants = limited(clock, max_requests=2)
    with taken(tenants):
        with taken(tenants):
            clock.now += 6
            assert retry_seconds(tenants) == 3, "half the age of the older one"
            with taken(tenants, caller=OTHER), taken(tenants, caller=ANONYMOUS):
                pass
        with taken(tenants):
            pass


def test_a_failed_request_is_no_longer_in_flight(clock: Clock) -> None:
    tenants = limited(clock, max_requests=1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), taken(tenants):
            raise ZeroDivisionError


def test_the_upper_bound_is_reserved_and_unused_tokens_are_returned(clock: Clock) -> None:
    tenants = limited(clock, tokens=100)
    with taken(tenants, 70) as first:
        retry_seconds(tenants, 40)
        with taken(tenants, 30):
            pass
        first.resize(20, lambda: 10)
        with taken(tenants, 80):
            retry_seconds(tenants, 1)
    with taken(tenants, 90):
        assert retry_seconds(tenants) is not None


@pytest.mark.parametrize(
    ("taken_tokens", "tokens", "message"),
    [
        (5, 300, "has 295 of its 300 tokens per minute left: this request can use 300; retry in 1.0 s"),
        (
            5,
            8194,
            "has 295 of its 300 tokens per minute left: this request can use 8194, more than the limit, and needs all "
            "300; retry in 1.0 s",
        ),
        (400, 10, "has exceeded its 300 tokens per minute by 100: this request can use 10; retry in 22.0 s"),
    ],
)
def test_a_rejection_names_the_remaining_and_the_needed_tokens(
    clock: Clock, taken_tokens: int, tokens: int, message: str
) -> None:
    tenants = limited(clock, tokens=300)
    with taken(tenants, taken_tokens), pytest.raises(Overloaded) as caught, tenants.admitted(ACME, tokens):
        pass
    assert str(caught.value) == f"tenant 'acme' {message}"


def test_a_request_is_admitted_after_its_retry_time(clock: Clock) -> None:
    tenants = limited(clock, tokens=600)  # 10 a second
    with taken(tenants, 600):
        seconds = retry_seconds(tenants, 50)
        assert seconds == pytest.approx(5)
        clock.now += seconds - 0.1
        assert retry_seconds(tenants, 50) == pytest.approx(0.1)
        clock.now += 0.1
        with taken(tenants, 50):
            pass


def test_a_request_above_a_minutes_tokens_needs_a_full_bucket_and_leaves_a_debt(clock: Clock) -> None:
    tenants = limited(clock, tokens=60)  # 1 a second
    with taken(tenants, 10):
        assert retry_seconds(tenants, 1000) == pytest.approx(10)
    with taken(tenants, 1000) as large:
        large.resize(1000, lambda: 90)
    assert retry_seconds(tenants, 1) == pytest.approx(31)


def test_random_requests_never_use_more_than_the_bucket_and_its_refill(clock: Clock) -> None:
    draw = random.Random(7)
    tenants = limited(clock, tokens=600)
    running: list[tuple[ExitStack, Reservation, int]] = []
    begun, used, refusals = clock.now, 0, 0
    for _ in range(5000):
        clock.now += draw.random()
        if running and draw.random() < 0.5:
            stack, reservation, most = running.pop(draw.randrange(len(running)))
            spent = draw.randint(0, most)
            reservation.resize(spent, lambda spent=spent: spent)  # type: ignore[misc]
            stack.close()
            used += spent
        most, stack = draw.randint(1, 200), ExitStack()
        try:
            running.append((stack, stack.enter_context(tenants.admitted(ACME, most)), most))
        except Overloaded:
            refusals += 1
        assert used <= 600 + (clock.now - begun) * 10
    assert refusals > 100
    assert used > 5000


def test_new_limits_apply_at_once_to_requests_in_flight(clock: Clock) -> None:
    tenants = limited(clock, max_requests=5, tokens=100)
    with taken(tenants, 80), taken(tenants, 10):
        tenants.set_limits({"acme": TenantLimits(2, 1000)})
        retry_seconds(tenants)
        tenants.set_limits({"acme": TenantLimits(3, 1000)})
        with taken(tenants, 910):
            retry_seconds(tenants)
        tenants.set_limits({"acme": TenantLimits(3, 50)})
        assert retry_seconds(tenants, 1) is not None
        tenants.set_limits({})
        with taken(tenants, 10**9), taken(tenants, 10**9):
            pass


# Token upper bounds.


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"prompt": {"text": "äbc"}, "stopping": {"max_tokens": 10}}, 4 + 10),
        ({"prompt": {"token_ids": {"ids": [1, 2]}}, "stopping": {"max_tokens": 10}}, 2 + 10),
        ({"prompt": {"token_ids": {"ids": [1]}}, "sampling": {"sample_count": 3}, "stopping": {"max_tokens": 5}}, 16),
        ({"prompt": {"token_ids": {"ids": [1]}}, "beam_search": {"width": 4}, "stopping": {"max_tokens": 5}}, 21),
        ({"prompt": {"text": "x" * 500}}, 100 + 100),
        ({"prompt": {"text": "x"}, "stopping": {"max_tokens": -5}, "sampling": {"sample_count": -3}}, 1),
    ],
)
def test_the_token_upper_bound_needs_no_tokenizer(fields: dict[str, object], most: int) -> None:
    request = gateway_pb2.GenerateRequest()
    request.MergeFrom(gateway_pb2.GenerateRequest(**fields))  # type: ignore[arg-type]
    assert token_upper_bound(request, 100, GenerationDefaults()) == most


def test_a_models_default_of_max_tokens_bounds_a_request_without_its_own() -> None:
    def bound(most: int, **stopping: int) -> int:
        given = gateway_pb2.GenerateRequest(prompt={"text": "x"}, stopping=stopping)  # type: ignore[arg-type]
        return token_upper_bound(given, 100, GenerationDefaults(max_tokens=most))

    assert (bound(33), bound(33, max_tokens=50), bound(33, min_tokens=40), bound(1000)) == (34, 51, 41, 101)


# Salts and ids.

APART, TOGETHER = Namespace(separate=True), Namespace(separate=False)


def test_salts_differ_between_tenants_and_between_their_own_salts() -> None:
    pairs = [("a", ""), ("a", "b"), ("ab", ""), ("a", "a"), ("aa", ""), ("b", "a")]
    salts = {APART.salt(*pair) for pair in pairs}
    assert len(salts) == len(pairs)
    assert APART.salt("a", "b") == APART.salt("a", "b")


def test_a_tenants_salt_is_not_valid_text() -> None:
    with pytest.raises(UnicodeDecodeError):
        APART.salt("a", "b").decode()


def test_with_public_prefixes_only_the_clients_salt_counts() -> None:
    assert TOGETHER.salt("a", "s") == TOGETHER.salt("b", "s") == TOGETHER.salt("", "s") == b"s"


def test_a_pin_names_its_tenant_exactly_if_tenants_are_separate() -> None:
    assert APART.salt_of_pin(gateway_pb2.PinPrompt(tenant="a", salt="s")) == APART.salt("a", "s")
    assert TOGETHER.salt_of_pin(gateway_pb2.PinPrompt(salt="s")) == b"s"
    for namespace, tenant in ((APART, ""), (APART, "a/b"), (APART, "a" * 300), (TOGETHER, "a")):
        with pytest.raises(InvalidField, match=r"^pin_prefix\.tenant ") as caught:
            namespace.salt_of_pin(gateway_pb2.PinPrompt(tenant=tenant))
        assert caught.value.field == "pin_prefix.tenant"


def test_request_ids_are_prefixed_with_the_tenant_if_any() -> None:
    assert qualified("", "x") == "x"
    assert qualified("a", "b/c") == "a/b/c"
