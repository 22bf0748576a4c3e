"""The sandbox page in a real browser shows the core's results."""

from collections.abc import Callable

import pytest

from tests.browser.conftest import Watched, map_url
from tests.running_quire import RunningService

SEQUENCES = """() => Object.fromEntries([...document.querySelectorAll('[data-sequence]')].map(card =>
    [card.dataset.sequence, [...card.querySelectorAll('.table b')].map(one => Number(one.textContent))]))"""
COUNTS = """() => [...document.querySelectorAll('#pool64 button')].map(one =>
    Number(/count (\\d+)/.exec(one.title)[1])).filter(count => count)"""
POLICY = """name => Object.fromEntries([...document.querySelectorAll(`[data-policy=${name}] [data-count]`)].map(one =>
    [one.dataset.count, Number(one.textContent.replaceAll(',', ''))]))"""

HEADLINES = """() => Object.fromEntries([...document.querySelectorAll('[data-policy]')].map(one =>
    [one.dataset.policy, [...one.querySelectorAll('p > *')].map(part => part.textContent).join(' · ')]))"""


@pytest.fixture
def sandbox(manager: Callable[..., RunningService], watched: Watched) -> Watched:
    watched.open(f"{map_url(manager())}/sandbox")
    return watched


def after(watched: Watched, action: Callable[[], None]) -> None:
    """Call `action`, and wait until the page shows its result."""
    before = watched.page.get_attribute("html", "data-operation")
    action()
    watched.wait_for("before => document.documentElement.dataset.operation !== before", before)


def press(watched: Watched, label: str) -> None:
    after(watched, lambda: watched.page.click(f"[data-do='{label}']"))


def begin(watched: Watched, tokens: int) -> None:
    watched.page.fill("#new input", str(tokens))
    after(watched, lambda: watched.page.click("#new button"))


def choose_size(watched: Watched, size: int) -> None:
    watched.page.select_option("#size", str(size))
    watched.page.wait_for_selector(f"#blocks-note >> text=block size {size}")


def newest(watched: Watched) -> str:
    return watched.page.inner_text("#log li:first-child span")


def test_the_teaching_texts_beam_example_takes_twelve_blocks_not_sixteen(sandbox: Watched) -> None:
    begin(sandbox, 64)
    for _ in range(3):
        press(sandbox, "fork 1")
    assert sandbox.evaluate(COUNTS) == [4, 4, 4, 4]
    for sequence in range(1, 5):
        sandbox.page.fill(f"#append-{sequence}", "20")
        press(sandbox, f"append {sequence}")
    assert sandbox.evaluate(COUNTS) == [4] * 4 + [1] * 8
    assert sandbox.evaluate(SEQUENCES) == {
        str(number): [1, 2, 3, 4, 3 + 2 * number, 4 + 2 * number] for number in range(1, 5)
    }
    press(sandbox, "write to last block 2")
    assert newest(sandbox) == "Sequence 2 rewrote its last token in place, because block 8 has no other holder."


def test_a_fork_that_writes_gets_a_copy_of_the_one_block(sandbox: Watched) -> None:
    choose_size(sandbox, 4)
    after(sandbox, lambda: sandbox.page.click("#text button"))
    press(sandbox, "fork 1")
    press(sandbox, "write to last block 2")
    assert newest(sandbox) == (
        "Sequence 2 rewrote its last token; block 2 is shared with sequence 1 and was copied to block 3."
    )
    assert sandbox.evaluate(SEQUENCES) == {"1": [1, 2], "2": [1, 3]}
    assert "Four score and seven" in sandbox.page.inner_text("[data-sequence='1'] .table")
    press(sandbox, "free 1")
    assert newest(sandbox) == "Sequence 1 was freed: block 1 is still held by other sequences and block 2 is free."


def test_contiguous_reservation_is_computed_for_the_same_sequences(sandbox: Watched) -> None:
    choose_size(sandbox, 16)
    begin(sandbox, 24)
    # 24 tokens that grow to 56, with a maximum of 320, in 1024 slots.
    assert sandbox.evaluate(f"() => ({POLICY})('max')") == {
        "used": 24, "reserved": 32, "internal": 264, "external": 0, "free": 704,
    }  # fmt: skip
    assert sandbox.evaluate(f"() => ({POLICY})('pow2')") == {
        "used": 24, "reserved": 32, "internal": 8, "external": 0, "free": 960,
    }  # fmt: skip
    assert sandbox.evaluate(f"() => ({POLICY})('exact')") == {
        "used": 24, "reserved": 32, "internal": 0, "external": 0, "free": 968,
    }  # fmt: skip
    assert sandbox.evaluate(f"() => ({POLICY})('paged')") == {
        "used": 24, "reserved": 0, "internal": 8, "external": 0, "free": 992,
    }  # fmt: skip
    for _ in range(3):
        press(sandbox, "fork 1")
    assert sandbox.evaluate(f"() => ({POLICY})('max')") == {
        "used": 72, "reserved": 96, "internal": 792, "external": 64, "free": 0,
    }  # fmt: skip
    assert "1 sequence would wait for memory" in sandbox.page.inner_text("[data-policy=max]")


def test_headlines_compare_tokens_for_slots_and_sharing_is_apart(sandbox: Watched) -> None:
    choose_size(sandbox, 16)
    begin(sandbox, 40)
    press(sandbox, "fork 1")
    press(sandbox, "append 2")
    # Two sequences of 40 and 41 tokens: 81 in 2 * 48 slots, and a growth of 32 each if contiguous.
    assert sandbox.evaluate(HEADLINES) == {
        "paged": "84.4 % · 81 tokens in 96 slots",
        "exact": "56.3 % · 81 tokens in 144 slots",
        "pow2": "31.6 % · 81 tokens in 256 slots",
        "max": "12.7 % · 81 tokens in 640 slots",
        # Both share two blocks of 16; the third was copied.
        "shared": "33.3 % · fewer slots: 64 instead of 96",
    }
    assert "2 blocks saved" in sandbox.page.inner_text("[data-policy=shared]")


def test_a_beam_search_runs_to_its_end_and_is_undone(sandbox: Watched) -> None:
    choose_size(sandbox, 4)
    for _ in range(5):
        after(sandbox, lambda: sandbox.page.click("#beam"))
    # Figure 9: candidates 1 and 2 continue, and blocks held by 0 and 3 alone are freed.
    tables = sandbox.evaluate(SEQUENCES)
    assert len(tables) == 4
    assert {table[0] for table in tables.values()} == {1}
    assert len({table[3] for table in tables.values()}) == 2
    assert len({table[4] for table in tables.values()}) == 4
    after(sandbox, lambda: sandbox.page.click("#beam"))
    assert "copied to block" in sandbox.page.inner_text("#log")
    after(sandbox, lambda: sandbox.page.click("#undo"))
    assert sandbox.evaluate(SEQUENCES) == tables
    after(sandbox, lambda: sandbox.page.click("#reset"))
    assert sandbox.evaluate(SEQUENCES) == {}
    assert sandbox.page.is_disabled("#undo")


def test_an_operation_that_does_not_fit_is_refused_with_the_reason(sandbox: Watched) -> None:
    choose_size(sandbox, 4)
    for tokens in (80, 80, 80):
        begin(sandbox, tokens)
    begin(sandbox, 20)
    assert newest(sandbox) == "Refused: 5 blocks are needed, 4 are available."
    assert sandbox.page.get_attribute("#log li:first-child", "class") == "refused"
    assert len(sandbox.evaluate(SEQUENCES)) == 3
    press(sandbox, "append 1")
    assert newest(sandbox) == "Refused: a sequence must have at most 80 tokens, not 81."


def test_a_reloaded_page_keeps_its_pool(sandbox: Watched) -> None:
    begin(sandbox, 30)
    sandbox.page.reload()
    sandbox.page.wait_for_selector("html[data-state=live]")
    assert sandbox.evaluate(SEQUENCES) == {"1": [1, 2]}
