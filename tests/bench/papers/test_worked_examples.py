"""The examples of the paper and of two texts that teach it, as the core computes them."""

from collections.abc import Iterator

import pytest

from bench.papers import worked_examples
from bench.papers.examples import block_counts, decoding, drawing, sharing
from bench.papers.examples.word_pool import Snapshot, WordPool
from bench.report import readme
from bench.report.targets import ROOT


def words(state: Snapshot, name: str) -> str:
    """The words that a block table leads to."""
    return " ".join(word for entry in state.tables[name] for word in entry.words)


def states() -> Iterator[Snapshot]:
    """The states of all figures."""
    yield from (moment.state for moment in (*decoding.one_request(), *sharing.two_samples()))
    yield decoding.two_requests()
    yield from sharing.beam_search()
    yield sharing.shared_prefix().state


def values() -> dict[str, float | None]:
    """The rows' values by metric."""
    return {row.metric.removeprefix("worked_examples_"): row.value for row in worked_examples.rows()}


def test_free_cached_and_held_blocks_are_all_blocks_in_every_state() -> None:
    for state in states():
        assert sum(state.counts) == len(state.pool)
        assert state.counts.held == sum(block.references > 0 for block in state.pool.values())
        assert state.faults == ()


def test_a_prompt_of_seven_tokens_gets_two_blocks_and_its_ninth_token_the_third() -> None:
    prompt, eight, nine, *_ = (moment.state for moment in decoding.one_request())
    assert (prompt.ids("A"), prompt.filled("A")) == ([7, 1], [4, 3])
    assert (eight.ids("A"), eight.filled("A")) == ([7, 1], [4, 4])
    assert (nine.ids("A"), nine.filled("A")) == ([7, 1, 3], [4, 4, 1])
    assert words(nine, "A") == "Four score and seven years ago our fathers brought"


def test_sixteen_tokens_fill_four_blocks_which_are_cached_once_they_are_released() -> None:
    *_, full, released = (moment.state for moment in decoding.one_request())
    assert (full.filled("A"), full.counts.held) == ([4, 4, 4, 4], 4)
    assert released.tables == {}
    assert released.counts == (4, 4, 0, 0)


def test_ten_and_five_tokens_leave_at_most_three_slots_empty() -> None:
    assert [decoding.unused_slots(tokens) for tokens in (10, 5, 8)] == [2, 3, 0]


def test_a_fresh_pool_grants_neighbouring_blocks() -> None:
    pool = WordPool(8, 4)
    pool.begin("A", ["word"] * 12)
    assert pool.snapshot().ids("A") == [1, 2, 3]


def test_two_requests_hold_blocks_between_each_other() -> None:
    state = decoding.two_requests()
    assert (state.ids("A"), state.filled("A")) == ([7, 1, 3], [4, 4, 1])
    assert (state.ids("B"), state.filled("B")) == ([5, 2], [4, 2])
    assert words(state, "B") == "It was the best of times"


def test_the_first_sample_to_write_gets_a_copy_and_the_last_holder_writes_in_place() -> None:
    forked, first, second = (moment.state for moment in sharing.two_samples())
    assert (forked.ids("A1"), forked.ids("A2"), forked.references(7, 1)) == ([7, 1], [7, 1], [2, 2])
    assert (first.ids("A1"), first.ids("A2"), first.references(7, 1, 3)) == ([7, 3], [7, 1], [2, 1, 1])
    assert first.copies == ((1, 3),)
    assert (second.ids("A2"), second.references(7, 1, 3), second.copies) == ([7, 1], [2, 1, 1], ())
    assert words(second, "A1") == "Four score and seven years ago our fathers"
    assert words(second, "A2") == "Four score and seven years ago our mothers"


def test_the_second_sample_gets_the_copy_if_it_writes_first() -> None:
    _, first, _ = (moment.state for moment in sharing.two_samples("Four score and seven years ago", ("A2", "A1")))
    assert (first.ids("A1"), first.ids("A2"), first.references(7, 1, 3)) == ([7, 1], [7, 3], [2, 1, 1])
    assert first.tables["A1"][1].words == ("years", "ago")


def test_the_candidates_of_figure_9_release_and_get_the_papers_blocks_without_a_copy() -> None:
    step = sharing.beam_search()
    assert [step.before.ids(name) for name in "0123"] == [[13, 1, 3, 5], [13, 1, 3, 6], [13, 1, 3, 7], [13, 2, 4, 8]]
    assert [step.after.ids(name) for name in ("1", "1'", "2", "2'")] == [
        [13, 1, 3, 6, 9],
        [13, 1, 3, 6, 10],
        [13, 1, 3, 7, 11],
        [13, 1, 3, 7, 12],
    ]
    assert (step.released, step.granted, step.after.copies) == ([2, 4, 5, 8], [9, 10, 11, 12], ())
    assert step.after.references(13, 1, 3, 6, 7) == [4, 4, 4, 2, 2]


def test_translations_share_the_full_blocks_of_a_pinned_prefix() -> None:
    one = sharing.shared_prefix()
    assert (one.state.ids("A"), one.state.ids("B")) == ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7, 8])
    assert one.state.references(*range(1, 9)) == [3, 3, 3, 3, 3, 1, 1, 1]  # two requests and the pin
    assert (one.cached_tokens, one.prompt_tokens) == (40, 46)
    assert words(one.state, "B").endswith("I love you => je t'aime")


def test_four_beams_of_ten_tokens_need_8_blocks_with_sharing_and_20_without() -> None:
    found = values()
    assert (found["beams_64_and_10"], found["beams_64_and_10_alone"]) == (8, 20)
    assert [block_counts.beams(64, generated, 4) for generated in (1, 16, 17, 32, 33)] == [8, 8, 12, 12, 16]


def test_a_prompt_of_256_tokens_in_four_beams_needs_16_blocks_with_sharing_and_64_without() -> None:
    found = values()
    assert (found["beams_256"], found["beams_256_alone"]) == (16, 64)


@pytest.mark.parametrize(
    ("metric", "blocks"),
    [
        *(("prompt", 2), ("decoded", 3), ("samples", 3), ("samples_alone", 4)),
        *(("beams_before", 9), ("beams_before_alone", 16), ("beams_after", 9), ("beams_after_alone", 20)),
        *(("prefix", 8), ("prefix_alone", 13), ("system_prompt", 256), ("system_prompt_alone", 1024)),
        *(("short_answer", 5), ("table", 128), ("table_of_size_1", 16_384), ("full_length", 7)),
    ],
)
def test_a_count_is_the_cores(metric: str, blocks: int) -> None:
    assert values()[metric] == blocks


def test_a_row_differs_from_the_text_only_where_the_page_says_so() -> None:
    rows = worked_examples.rows()
    assert [row.metric for row in rows if row.deviation] == [
        "worked_examples_beams_64_and_10",
        "worked_examples_beams_64_and_10_alone",
    ]
    assert {row.kind for row in rows} == {"arithmetic"}


def test_a_drawing_has_the_words_in_the_slots_of_their_blocks() -> None:
    lines = drawing.table_with_pool(decoding.one_request()[2].state).splitlines()
    first, last = (" ".join(lines[place].split()) for place in (2, 4))
    assert first == "logical 0 Four score and seven 7 4 1 years ago our fathers"
    assert last == "logical 2 brought 3 1 3 brought . . ."


def test_no_line_of_a_drawing_is_wider_than_100_columns() -> None:
    drawn = worked_examples.markdown().split("```")[1::2]
    assert len(drawn) == 4
    assert max(len(line) for one in drawn for line in one.splitlines()) <= 100


def test_the_page_is_among_those_that_are_checked() -> None:
    assert ROOT / "docs" / "papers.md" in readme.PAGES
    assert worked_examples.markdown() in (ROOT / "docs" / "papers.md").read_text()
