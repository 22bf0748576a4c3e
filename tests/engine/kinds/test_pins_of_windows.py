"""Pins hold blocks of window kinds, too: what no longer fits beside them is refused, and nothing waits for ever."""

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from engine.errors import EngineUnavailable, InvalidRequest, PinTooLarge
from engine.schedule.pool.pins import PinnedPrefix
from engine.schedule.request import BeamSearch, Failure
from tests.engine.families import CONTEXT, FAMILIES, Checkpoint
from tests.engine_in_process import ModelEngine

BLOCK_SIZE = 4
Prompt = Callable[[int], list[int]]


@pytest.fixture
def engine(checkpoint: Checkpoint) -> ModelEngine:
    return ModelEngine(checkpoint(FAMILIES["gemma2"]), block_size=BLOCK_SIZE, kinds=True, token_budget=8)


def pin(engine: ModelEngine, name: str, tokens: list[int]) -> PinnedPrefix:
    pinned = engine.scheduler.requests.pin(name, tuple(tokens), b"", float(engine.turns))
    engine.turn_until(lambda: engine.scheduler.empty)
    return pinned


def pins(engine: ModelEngine, random_prompt: Prompt) -> Iterator[PinnedPrefix]:
    """Pin prefixes until one is refused."""
    with suppress(PinTooLarge):
        for number in range(100):
            yield pin(engine, f"p{number}", random_prompt(12))
    assert number < 60


def test_pins_fill_a_window_kind_and_what_does_not_fit_beside_them_is_refused_by_its_name(
    engine: ModelEngine, random_prompt: Prompt
) -> None:
    [window] = engine.scheduler.capacity.windows
    served, refusals = 0, list[str]()
    for number, one in enumerate(pins(engine, random_prompt)):
        assert one.pinned
        for length in (1, 10, 21, CONTEXT - 20):
            try:
                engine.submit(random_prompt(length), 20, request_id=f"{number} {length}")
                served += 1
            except InvalidRequest as error:
                refusals.append(str(error))
        engine.turn_until(lambda: engine.scheduler.empty)
    [pinned] = engine.scheduler.capacity.pinned_in_windows
    held = {block for blocks in engine.blocks.pool.state.windows[0].pins.values() for block in blocks}
    assert len(held) == pinned > window.device_blocks / 2
    assert served > 20
    assert all(f"of kind {window.name}; the pool has {window.device_blocks}, " in one for one in refusals)
    assert {one.failure for one in engine.finished.values()} == {None}
    assert engine.scheduler.capacity.unpinned_blocks > 100
    with pytest.raises(PinTooLarge, match=f"blocks of kind {window.name}, and a request up to"):
        pin(engine, "one more", random_prompt(12))


def test_pins_are_computed_again_after_a_reset_in_a_window_kind_that_is_nearly_full(
    engine: ModelEngine, random_prompt: Prompt
) -> None:
    declared = list(pins(engine, random_prompt))
    engine.scheduler.requests.reset(float(engine.turns))
    engine.turn_until(lambda: engine.scheduler.empty)
    assert all(one.pinned for one in declared)


def test_a_pin_beside_which_a_live_request_would_not_fit_into_a_window_kind_is_refused(
    engine: ModelEngine, random_prompt: Prompt
) -> None:
    [window] = engine.scheduler.capacity.windows
    engine.submit(random_prompt(20), 20, samples=7)
    for name in ("first", "second"):
        engine.scheduler.requests.pin(name, tuple(random_prompt(12)), b"", 0.0)
    with pytest.raises(PinTooLarge, match=f"2 blocks of kind {window.name}, and a request up to .* are unpinned"):
        engine.scheduler.requests.pin("third", tuple(random_prompt(12)), b"", 0.0)
    engine.turn_until(lambda: engine.scheduler.empty)


def test_a_live_request_that_no_longer_fits_beside_pins_fails_by_the_kind(
    engine: ModelEngine, random_prompt: Prompt
) -> None:
    [window] = engine.scheduler.capacity.windows
    for number in range(4):
        pin(engine, f"p{number}", random_prompt(12))
    name = engine.submit(random_prompt(40), 20)
    engine.turn_times(2)
    [pinned] = engine.scheduler.capacity.pinned_in_windows
    engine.scheduler.requests.withhold([(), range(1, window.device_blocks - pinned - 1)])
    engine.turn()
    assert engine.finished[name].failure is Failure.BLOCK_MANAGER
    assert f"of kind {window.name}, but 2 are left: others are withheld or pinned" in engine.finished[name].detail


@pytest.mark.parametrize("beams", [False, True])
def test_samples_share_what_their_windows_see_of_the_prompt(
    checkpoint: Checkpoint, random_prompt: Prompt, beams: bool
) -> None:
    """A request that fits if layers keep everything fits if they do not."""
    prompt, folder = random_prompt(20), checkpoint(FAMILIES["gemma2"])
    blocks = len(prompt) // BLOCK_SIZE + 5
    engine = ModelEngine(folder, block_size=BLOCK_SIZE, kinds=True, device_blocks=blocks, token_budget=16)
    [window] = engine.scheduler.capacity.windows
    samples = {"beam_search": BeamSearch(5)} if beams else {"samples": 5}
    engine.submit(prompt, 4, request_id="fits", **samples)
    engine.run()
    assert engine.finished["fits"].failure is None
    engine.scheduler.requests.withhold([(), range(1, window.device_blocks - 5)])
    with pytest.raises(
        EngineUnavailable, match=f"for each of 5 {'beams' if beams else 'samples'} take .* {window.name}"
    ):
        engine.submit(prompt, 4, **samples)
