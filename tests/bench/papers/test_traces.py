"""Traces: what is read, drawn and refused."""

from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from bench.loads.memory import DATA_VARIABLE, DataMissing, Lengths
from bench.papers.simulation.traces import InvalidTrace, load, poisson, read_lengths, turns
from tests.services.loadgen.data_files import data_file


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_rows_with_an_empty_prompt_or_output_are_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, "prompt,output\n3,4\n0,5\n6,0\n7,8\n")
    assert read_lengths(path, "prompt", "output") == [Lengths(3, 4), Lengths(7, 8)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column 'prompt': it has none"),
        ("prompt,answer\n1,2\n", "has no column 'output': it has prompt, answer"),
        ("prompt,output\n1,2\n3,x\n", "line 3: lengths must be integers of at least 0, not '3' and 'x'"),
        ("prompt,output\n1,-2\n", "line 2: lengths must be integers of at least 0, not '1' and '-2'"),
        ("prompt,output\n1\n", "line 2: lengths must be integers of at least 0, not '1' and None"),
        ("prompt,output\n1.5,2\n", "line 2: lengths must be integers"),
        ("prompt,output\n1_0,2\n", "line 2: lengths must be integers"),
        ("prompt,output\n\u0663,2\n", "line 2: lengths must be integers"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidTrace, match=message):
        read_lengths(written(tmp_path, text), "prompt", "output")


def test_bytes_that_are_no_text_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xff\xfe\x00")
    for file in (path, tmp_path / "none.csv", tmp_path):
        with pytest.raises(InvalidTrace, match="cannot be read"):
            read_lengths(file, "prompt", "output")


def test_an_unknown_workload_and_a_missing_folder_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InvalidTrace, match="no workload 'sharegtp': there are sharegpt, alpaca, chat, chat_of_1024, translation"
    ):
        load("sharegtp")
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    with pytest.raises(DataMissing, match=r"QUIRE_DATA names no folder with sharegpt_opt_lengths\.csv"):
        load("sharegpt")


@pytest.mark.parametrize(("rate", "seconds"), [(0, 1), (-1, 1), (float("nan"), 1), (float("inf"), 1), (1, 0)])
def test_rates_and_durations_that_are_not_finite_and_positive_are_refused(rate: float, seconds: float) -> None:
    with pytest.raises(InvalidTrace, match="must be finite and above 0"):
        poisson([Lengths(1, 1)], rate, seconds)


def test_a_run_has_a_bound_on_its_requests() -> None:
    with pytest.raises(InvalidTrace, match="rate times seconds must be at most 100000 requests, not 1e\\+12"):
        poisson([Lengths(1, 1)], 1.0, 1e12)


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeffprompt,output\n3,4\n")
    assert read_lengths(path, "prompt", "output") == [Lengths(3, 4)]


def test_sentences_that_are_no_text_or_beyond_the_context_are_refused_or_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    (tmp_path / "newstest2014_en.txt").write_text("two words\n" + "word " * 20_000 + "\n")
    assert len(load("translation")) == 1
    (tmp_path / "newstest2014_en.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidTrace, match="cannot be read"):
        load("translation")


def test_a_trace_without_requests_is_refused() -> None:
    with pytest.raises(InvalidTrace, match="has no requests"):
        poisson([], 1.0, 1.0)


def test_arrivals_have_the_rate_and_depend_on_the_seed_only() -> None:
    lengths = [Lengths(1, 2), Lengths(3, 4)]
    drawn = poisson(lengths, 20.0, 500.0, seed=1)
    assert drawn == poisson(lengths, 20.0, 500.0, seed=1) != poisson(lengths, 20.0, 500.0, seed=2)
    assert len(drawn) == pytest.approx(10_000, rel=0.05)
    times = [one.seconds for one in drawn]
    assert times == sorted(times)
    assert times[-1] < 500
    # Of a Poisson process, the times between arrivals have a standard deviation equal to their mean.
    between = [later - earlier for earlier, later in pairwise(times)]
    assert fmean((one - 0.05) ** 2 for one in between) ** 0.5 == pytest.approx(0.05, rel=0.1)


def test_sharegpt_has_the_papers_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(data_file("sharegpt_opt_lengths.csv").parent))
    lengths = load("sharegpt")
    assert len(lengths) == 79_731
    assert fmean(one.prompt for one in lengths) == pytest.approx(161.31, abs=0.005)
    assert fmean(one.output for one in lengths) == pytest.approx(337.99, abs=0.005)


CONVERSATIONS = "5,10\n20,5\n40,2000\n7,3\n1100,4\n"  # of three turns, and of two


def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int = 40) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    (tmp_path / "sharegpt_8k_lengths.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + CONVERSATIONS * times)


@pytest.mark.parametrize("new", [0.1, 0.5, 1.0])
def test_turns_of_a_conversation_arrive_in_their_order_and_all_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: float
) -> None:
    chats(tmp_path, monkeypatch)
    lengths = [one.lengths for one in turns(new, 2.0, 90.0)]
    first, second, third = Lengths(5, 10), Lengths(20, 5), Lengths(40, 1016)
    for end in range(len(lengths)):
        counted = [lengths[:end].count(turn) for turn in (first, second, third)]
        assert counted == sorted(counted, reverse=True)
    assert lengths.count(Lengths(7, 3)) == pytest.approx(lengths.count(Lengths(1024, 4)), abs=1)
    assert max(one.prompt for one in lengths) == 1024


def test_more_new_conversations_begin_with_a_higher_probability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats(tmp_path, monkeypatch)
    beginnings = [
        sum(one.lengths in (Lengths(5, 10), Lengths(7, 3)) for one in turns(new, 2.0, 90.0)[:60]) for new in (0.1, 0.9)
    ]
    assert beginnings[0] < beginnings[1]


def test_a_chat_file_with_fewer_turns_than_requests_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chats(tmp_path, monkeypatch, times=1)
    with pytest.raises(InvalidTrace, match="has 5 turns, but"):
        turns(0.5, 2.0, 90.0)


def test_chats_have_at_most_1024_tokens_of_prompt_and_of_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(data_file("sharegpt_8k_lengths.csv").parent))
    lengths = load("chat")
    assert max(one.prompt for one in lengths) == max(one.output for one in lengths) == 1024
