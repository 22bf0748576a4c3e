import asyncio
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from services.gateway.access import authentication
from services.gateway.access.api_keys import ApiKeys, TenantLimits, digest_of, parse
from services.gateway.access.authentication import Authentication
from services.gateway.access.callers import ANONYMOUS, Caller
from services.gateway.access.tenants import Tenants
from services.runtime.errors import PermissionDenied, Unauthenticated
from services.runtime.settings import InvalidSetting

NEW_YEAR = datetime(2027, 1, 1, tzinfo=UTC).timestamp()
# Constant, because workers of a test run compare the names of tests.
KEY, OTHER = (f"quire-{letter * 43}" for letter in "AB")


def entry(key: str = KEY, tenant: str = "acme", *more: str) -> str:
    return "\n".join(["[[key]]", f'tenant = "{tenant}"', f'sha256 = "{digest_of(key).hex()}"', *more, ""])


def keys(*entries: str) -> ApiKeys:
    return parse("\n".join(entries), "keys.toml")


def refused(found: ApiKeys, authorization: str | None, now: float = 0) -> str:
    with pytest.raises(Unauthenticated) as caught:
        found.caller(authorization, now)
    return str(caught.value)


def test_a_key_belongs_to_its_tenant_and_is_an_operators_only_if_stated() -> None:
    found = keys(entry(), entry(OTHER, "ops", "operator = true"))
    assert found.caller(f"Bearer {KEY}", 0) == Caller("acme", operator=False, best_priority=0)
    assert found.caller(f"bearer  {OTHER} ", 0) == Caller("ops", operator=True, best_priority=0)


WRONG = {
    "nothing": None,
    "empty": "",
    "no key": "Bearer",
    "an empty key": "Bearer ",
    "a bare key": KEY,
    "another scheme": f"Basic {KEY}",
    "one character less": f"Bearer {KEY[:-1]}",
    "one character more": f"Bearer {KEY}x",
    "the digest": f"Bearer {digest_of(KEY).hex()}",
    "the key twice": f"Bearer {KEY} {KEY}",
    "no text": "Bearer \udcff",
}


@pytest.mark.parametrize("authorization", WRONG.values(), ids=WRONG)
def test_missing_and_invalid_keys_are_rejected_with_the_same_message(authorization: str | None) -> None:
    assert refused(keys(entry()), authorization) == refused(keys(entry()), None)


def test_an_expired_key_is_rejected_as_expired() -> None:
    found = keys(entry(KEY, "acme", "expires = 2027-01-01T00:00:00Z"))
    assert found.caller(f"Bearer {KEY}", NEW_YEAR - 1).tenant == "acme"
    assert refused(found, f"Bearer {KEY}", NEW_YEAR) == "the API key has expired"


def test_limits_belong_to_the_tenant_of_a_key() -> None:
    limits = ("max_concurrent_requests = 8", "tokens_per_minute = 1000")
    found = keys(entry(KEY, "acme", *limits), entry(OTHER, "acme", "operator = true", *limits), entry("x", "free"))
    assert found.limits == {"acme": TenantLimits(8, 1000), "free": TenantLimits()}


@pytest.mark.parametrize(("stated", "best"), [((), 0), (("best_priority = -2",), -2), (("best_priority = 3",), 3)])
def test_a_priority_better_than_the_keys_best_is_rejected(stated: tuple[str, ...], best: int) -> None:
    caller = keys(entry(KEY, "acme", *stated)).caller(f"Bearer {KEY}", 0)
    for priority in (best, best + 1, 2**31 - 1):
        caller.check_priority(priority)
    with pytest.raises(
        PermissionDenied, match=f"priority must be at least {best} with this API key, not {best - 1}"
    ) as refusal:
        caller.check_priority(best - 1)
    assert refusal.value.field == "priority"


def test_anonymous_callers_can_use_any_priority() -> None:
    ANONYMOUS.check_priority(-(2**31))


@pytest.mark.parametrize("wrong", ["'0'", "1.5", "true", "2147483648", "-2147483649"])
def test_a_best_priority_outside_32_bits_is_rejected(wrong: str) -> None:
    with pytest.raises(InvalidSetting, match="best_priority must be an integer of 32 bits, not "):
        keys(entry(KEY, "acme", f"best_priority = {wrong}"))


def test_a_file_can_state_that_there_are_no_keys() -> None:
    found = parse("key = []", "keys.toml")
    assert len(found) == 0
    refused(found, f"Bearer {KEY}")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "[[key]] is missing"),
        ("[[key]", "must be TOML: .*line 1"),
        (entry() + "[[kez]]\n", "unknown field 'kez'"),
        ("key = 1", "key must be a list"),
        ("key = [1]", "entry 1: the entry must be a table"),
        ("[[key]]", "entry 1: tenant must be .*, not ''"),
        (entry(tenant="a/b"), "entry 1: tenant must be .*, not 'a/b'"),
        (entry(tenant="a" * 65), "entry 1: tenant must be"),
        (entry(tenant="ä"), "entry 1: tenant must be"),
        ('[[key]]\ntenant = "acme"', "entry 1: sha256 must be"),
        (f'[[key]]\ntenant = "acme"\nsha256 = "{KEY}"', "entry 1: sha256 must be"),
        (entry() + entry(tenant="b"), "entry 2: sha256 must be unique, entry 1"),
        (
            entry() + entry(OTHER, "acme", "tokens_per_minute = 5"),
            "entry 2: the limits of tenant 'acme' must be those of entry 1",
        ),
        (entry() + entry(OTHER, "b", "color = 1"), "entry 2: unknown field 'color'"),
        (entry(KEY, "acme", "operator = 1"), "operator must be true or false, not 1"),
        (entry(KEY, "acme", "tokens_per_minute = 0"), "tokens_per_minute must be .*, not 0"),
        (entry(KEY, "acme", "tokens_per_minute = true"), "tokens_per_minute must be .*, not True"),
        (entry(KEY, "acme", "max_concurrent_requests = 1.5"), "max_concurrent_requests must be .*, not 1.5"),
        (entry(KEY, "acme", "expires = 2027-01-01T00:00:00"), "expires must be .* zone, .*, not 2027-01-01 00:00:00"),
        (entry(KEY, "acme", "expires = 2027-01-01"), "expires must be .*, not 2027-01-01"),
    ],
)
def test_an_invalid_file_is_rejected_with_its_path_and_entry(text: str, fault: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^api_keys: 'keys\.toml'") as caught:
        parse(text, "keys.toml")
    caught.match(fault.replace("[[key]]", r"\[\[key\]\]"))
    assert KEY not in str(caught.value)


def test_without_a_file_callers_are_anonymous() -> None:
    assert Authentication("", Tenants(lambda: 0.0)).authenticate(None) == ANONYMOUS


@pytest.mark.parametrize("name", ["", "absent.toml"])
def test_an_unreadable_file_prevents_the_start(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidSetting, match="cannot read"):
        Authentication(str(tmp_path / name), Tenants(lambda: 0.0))


def test_a_changed_file_is_reloaded_and_an_invalid_one_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(authentication, "_POLL_SECONDS", 0.01)
    path = tmp_path / "keys.toml"
    path.write_text(entry())

    def replace(text: str) -> None:
        new = tmp_path / "new.toml"
        new.write_text(text)
        os.replace(new, path)  # noqa: PTH105  (what an editor does)

    async def follow() -> None:
        one = Authentication(str(path), Tenants(lambda: 0.0))
        following = asyncio.create_task(one.reload_on_change())

        async def logged(text: str) -> None:
            async with asyncio.timeout(60):
                while text not in caplog.text:
                    await asyncio.sleep(0.01)

        replace(entry(OTHER, "b"))
        await logged("1 API keys were loaded")
        assert one.authenticate(f"Bearer {OTHER}").tenant == "b"
        with pytest.raises(Unauthenticated):
            one.authenticate(f"Bearer {KEY}")
        replace("nonsense")
        await logged("the API keys were not reloaded: api_keys:")
        assert one.authenticate(f"Bearer {OTHER}").tenant == "b"
        path.unlink()
        await logged("cannot read")
        assert one.authenticate(f"Bearer {OTHER}").tenant == "b"
        replace(entry() + entry(OTHER, "b"))
        await logged("2 API keys were loaded")
        assert one.authenticate(f"Bearer {KEY}").tenant == "acme"
        following.cancel()

    with caplog.at_level("INFO", "quire.gateway"):
        asyncio.run(follow())
