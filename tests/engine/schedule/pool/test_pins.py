"""Pinned prefixes in the engine: computed like a request, never evicted, and released when unpinned."""

from collections.abc import Callable

import pytest

import kvmanager
from engine.errors import InvalidPin, InvalidRequest, PinExists, PinFailed, PinTooLarge, PinUnavailable, UnknownPin
from engine.schedule.limits import Limits, Preemption
from engine.schedule.pool.pins import PinnedPrefix
from engine.schedule.request import Failure
from kvmanager.verbs import pinning
from tests.engine.schedule.test_scheduler import BLOCK, CONTEXT, VOCABULARY, Rig

PREFIX = tuple(range(1, 10))  # two whole blocks and a token
WHOLE = PREFIX[: 2 * BLOCK]


@pytest.fixture
def rig() -> Rig:
    return Rig(device_blocks=12)


def pin(
    rig: Rig, name: str = "p", token_ids: tuple[int, ...] = PREFIX, salt: bytes = b"", run: bool = True
) -> PinnedPrefix:
    pinned = rig.scheduler.requests.pin(name, token_ids, salt, float(rig.turns))
    if run:
        rig.run()
    return pinned


def cached(rig: Rig, prompt: tuple[int, ...], salt: bytes = b"") -> int:
    name = rig.submit(prompt, 2, salt=salt)
    rig.run()
    return rig.cached[name]


def crowd_out(rig: Rig) -> None:
    """Run requests that write to every available block."""
    for number in range(6):
        rig.submit([20 + number] * 15, 10)
    rig.run()


class TestPinning:
    def test_a_pin_computes_and_keeps_whole_blocks_without_a_token(self, rig: Rig) -> None:
        pinned = pin(rig)
        assert (pinned.pinned, pinned.token_ids, len(pinned.blocks)) == (True, WHOLE, 2)
        assert rig.blocks.pool.state.pins == {"p": list(pinned.blocks)}
        assert rig.scheduler.totals.generated_tokens == 0
        assert rig.scheduler.totals.prompt_tokens == 0, "a pin is no prompt"
        assert (rig.finished, rig.tokens) == ({}, {})
        rig.watched.check_idle()

    def test_commits_pins_and_frees_in_one_step(self, rig: Rig) -> None:
        pin(rig)
        (step,) = (step for step in rig.steps if step.pins)
        (item,) = step.pins
        assert [commit.sequence for commit in step.commits] == [item.sequence]  # type: ignore[union-attr]
        assert [free.sequence for free in step.frees] == [item.sequence]  # type: ignore[union-attr]

    def test_a_pin_survives_the_eviction_of_all_other_blocks(self, rig: Rig) -> None:
        other = (*range(11, 20),)
        assert (cached(rig, other), cached(rig, other)) == (0, 2 * BLOCK)
        pin(rig)
        crowd_out(rig)
        assert cached(rig, other) == 0
        assert cached(rig, (*PREFIX, 5)) == 2 * BLOCK

    def test_is_shared_only_by_requests_of_its_salt(self, rig: Rig) -> None:
        pin(rig, salt=b"tenant")
        assert cached(rig, (*PREFIX, 5)) == 0
        assert cached(rig, (*PREFIX, 5), salt=b"tenant") == 2 * BLOCK

    def test_a_prefix_is_prefilled_in_chunks_of_the_budget(self) -> None:
        rig = Rig(device_blocks=12, limits=Limits(3, 2, 6))
        assert pin(rig).pinned
        assert [len(work.token_ids) for plan in rig.runner.plans for work in plan.work] == [3, 3, 2]

    def test_waits_in_the_queue_and_survives_preemption(self) -> None:
        for preemption in (Preemption.RECOMPUTE, Preemption.SWAP):
            rig = Rig(8, Limits(4, 4, 6, preemption), host_blocks=8)
            for number in range(3):
                rig.submit([20 + number] * 3, 9, priority=number - 2)
            pinned = pin(rig, token_ids=tuple(range(16)))
            assert pinned.pinned
            assert all(group.generated == 9 for group in rig.finished.values())

    def test_a_repeated_pin_changes_nothing(self, rig: Rig) -> None:
        first = pin(rig, run=False)
        assert pin(rig) is first
        steps = len(rig.steps)
        assert pin(rig, token_ids=WHOLE) is first, "a partial block is not pinned"
        assert len(rig.steps) == steps

    def test_prefixes_with_a_common_beginning_share_blocks(self, rig: Rig) -> None:
        pin(rig, "short", tuple(range(8)))
        longer = pin(rig, "long", tuple(range(16)))
        assert (len(longer.blocks), rig.blocks.pool.device.counts.held) == (4, 4)
        assert rig.scheduler.capacity.unpinned_blocks == 8
        rig.scheduler.requests.unpin("short")
        rig.run()
        assert rig.blocks.pool.device.counts.held == 4


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "token_ids", "kind", "field", "words"),
        [
            ("", PREFIX, InvalidPin, "name", "not 0"),
            ("n" * 129, PREFIX, InvalidPin, "name", "between 1 and 128 bytes, not 129"),
            ("q", (1, 2, 3), InvalidPin, "prompt", "prompt must have at least 4 tokens .*, not 3"),
            ("q", (1,) * CONTEXT, InvalidPin, "prompt", "prompt must have fewer than 32 tokens"),
            ("q", (1, 2, 3, VOCABULARY), InvalidPin, "prompt", "must have token ids between 0 and 49, not 50"),
            ("q", (1, 2, 3, -1), InvalidPin, "prompt", "between 0 and 49, not -1"),
            ("q", tuple(range(24)), PinTooLarge, "prompt", "fewer than 6 blocks, .*, not 6"),
            ("p", (9,) * 8, PinExists, "name", "name 'p' is in use for a prefix with other tokens"),
        ],
    )
    def test_an_invalid_pin_is_refused(
        self, name: str, token_ids: tuple[int, ...], kind: type[Exception], field: str, words: str
    ) -> None:
        rig = Rig(device_blocks=8)
        pin(rig)
        with pytest.raises(kind, match=words) as refused:
            pin(rig, name, token_ids)
        assert refused.value.field == field  # type: ignore[attr-defined]
        assert [one.name for one in rig.scheduler.pins.list_pins()] == ["p"]
        assert rig.scheduler.empty

    def test_the_same_tokens_with_another_salt_are_another_prefix(self, rig: Rig) -> None:
        pin(rig)
        with pytest.raises(PinExists):
            pin(rig, salt=b"other")

    def test_a_pin_beside_which_a_live_request_would_not_fit_is_refused(self) -> None:
        rig = Rig(device_blocks=8)
        rig.submit([30] * 10, 17)
        with pytest.raises(PinTooLarge, match="needs 2 blocks and a live request up to 7; 8 are unpinned"):
            pin(rig)
        rig.run()
        assert pin(rig).pinned

    def test_a_request_that_needs_pinned_blocks_is_refused_naming_both_numbers(self) -> None:
        rig = Rig(device_blocks=8)
        pin(rig)
        with pytest.raises(InvalidRequest, match="take 7 blocks; the pool has 8, 2 of them pinned"):
            rig.submit([30] * 10, 17)
        rig.submit([30] * 10, 15)
        rig.run()

    def test_a_live_request_of_that_id_is_not_disturbed(self, rig: Rig) -> None:
        rig.submit([1], 2, request_id="pin:p")
        with pytest.raises(PinExists, match="id 'pin:p' is live"):
            pin(rig)

    def test_a_draining_engine_pins_nothing(self, rig: Rig) -> None:
        rig.scheduler.requests.drain()
        with pytest.raises(PinUnavailable, match="draining"):
            pin(rig)

    @pytest.mark.parametrize("answered", [True, False])
    def test_a_pin_that_the_block_manager_refuses_is_removed(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch, answered: bool
    ) -> None:
        def refuse(*_: object) -> None:
            raise kvmanager.PinTooLarge("it has no room")

        monkeypatch.setattr(pinning, "checking_others_fit", refuse)
        pinned = pin(rig, run=False)
        rig.turn_until(lambda: any(step.pins for step in rig.steps))
        if not answered:
            rig.reconnect()
        rig.run()
        assert isinstance(pinned.failure, PinTooLarge)
        assert rig.blocks.pool.state.pins == {}
        assert rig.scheduler.pins.list_pins() == []
        assert rig.scheduler.capacity.unpinned_blocks == 12
        rig.watched.check_idle()


class TestUnpinning:
    def test_releases_the_blocks_but_leaves_them_cached(self, rig: Rig) -> None:
        pin(rig)
        rig.scheduler.requests.unpin("p")
        rig.run()
        assert rig.blocks.pool.device.counts.held == 0
        assert cached(rig, (*PREFIX, 5)) == 2 * BLOCK
        assert rig.scheduler.capacity.unpinned_blocks == 12

    def test_unpinning_an_unknown_name_is_refused(self, rig: Rig) -> None:
        with pytest.raises(UnknownPin, match="name 'p' is not pinned"):
            rig.scheduler.requests.unpin("p")

    @pytest.mark.parametrize("turns", range(7))
    @pytest.mark.parametrize("delay", [0, 3])
    def test_a_pin_can_be_removed_at_any_moment(self, rig: Rig, turns: int, delay: int) -> None:
        rig.blocks.delay = delay
        pinned = pin(rig, run=False)
        rig.turn_times(turns)
        rig.scheduler.requests.unpin("p")
        assert isinstance(pinned.failure, UnknownPin)
        again = pin(rig, token_ids=(7,) * 8)
        assert again.pinned
        assert rig.blocks.pool.state.pins == {"p": list(again.blocks)}
        rig.watched.check_idle()


class TestReset:
    def test_a_reset_empties_the_prefix_cache(self, rig: Rig) -> None:
        assert (cached(rig, PREFIX), cached(rig, PREFIX)) == (0, 2 * BLOCK)
        rig.scheduler.requests.reset(0.0)
        assert cached(rig, PREFIX) == 0

    @pytest.mark.parametrize("turns", range(7))
    @pytest.mark.parametrize("delay", [0, 3])
    def test_a_reset_recomputes_pins(self, rig: Rig, turns: int, delay: int) -> None:
        rig.blocks.delay = delay
        pinned = pin(rig, run=False)
        rig.turn_times(turns)
        rig.scheduler.requests.reset(0.0)
        rig.run()
        assert pinned.pinned
        assert rig.blocks.pool.state.pins == {"p": list(pinned.blocks)}
        assert cached(rig, (*PREFIX, 5)) == 2 * BLOCK
        rig.watched.check_idle()

    def test_does_not_affect_running_requests(self, rig: Rig) -> None:
        rig.submit([1, 2, 3, 4, 5], 12)
        rig.turn_times(5)
        rig.scheduler.requests.reset(0.0)
        rig.run()
        assert len(rig.tokens["r0"]) == 12
        assert cached(rig, (1, 2, 3, 4, 5)) == 0


class TestDisconnectedBlockManager:
    @pytest.mark.parametrize("change", ["unpin", "reset", "pin"])
    @pytest.mark.parametrize("turns", range(4))
    def test_pins_are_recomputed_after_a_reconnection(self, rig: Rig, turns: int, change: str) -> None:
        kept = pin(rig, "kept")
        pin(rig, "other", (9,) * 8)
        changes: dict[str, Callable[[], object]] = {
            "unpin": lambda: rig.scheduler.requests.unpin("other"),
            "reset": lambda: rig.scheduler.requests.reset(0.0),
            "pin": lambda: pin(rig, "more", (8,) * 4, run=False),
        }
        changes[change]()
        rig.turn_times(turns)
        rig.reconnect()
        rig.run()
        pins = {one.name: list(one.blocks) for one in rig.scheduler.pins.list_pins()}
        assert rig.blocks.pool.state.pins == pins
        assert pins.keys() == {"kept", "other", "more"} - ({"other"} if change == "unpin" else set()) - (
            set() if change == "pin" else {"more"}
        )
        assert kept.pinned
        assert cached(rig, (*PREFIX, 5)) == 2 * BLOCK
        rig.watched.check_idle()

    def test_a_lost_block_manager_fails_computing_pins_but_no_finished_pin(self, rig: Rig) -> None:
        kept, late = pin(rig, "kept"), pin(rig, "late", (8,) * 8, run=False)
        rig.scheduler.requests.fail_all(Failure.BLOCK_MANAGER, "disconnected")
        rig.run()
        assert isinstance(late.failure, PinUnavailable)
        assert kept.pinned


def test_a_step_that_fails_ends_the_pin_that_it_computed(rig: Rig) -> None:
    rig.runner.fail_next = True
    pinned = pin(rig)
    assert isinstance(pinned.failure, PinFailed)
    assert "was not computed: step 1 failed" in str(pinned.failure)
    assert pin(rig).pinned
