"""Sessions of calls from lengths, files and traces."""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from services.loadgen.workload import rows
from services.loadgen.workload.lengths import Fixed, InvalidLengths, LogNormal, Uniform, parse
from services.loadgen.workload.prompts import PromptMaker
from services.loadgen.workload.rows import InvalidFile
from services.loadgen.workload.selection import InvalidSelection, Selection
from services.loadgen.workload.workloads import Call, RandomLengths, Recorded, Session
from tests.services.loadgen.data_files import data_file

MAKER = PromptMaker(3, 50_000)

MOONCAKE = """\
{"timestamp": 2000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 500, "input_length": 1030, "output_length": 6, "hash_ids": [7, 8, 11]}
{"timestamp": 2500, "input_length": 512, "output_length": 0, "hash_ids": [12]}
"""
AGENTS = """\
{"session":4,"timestamp_ms":0,"input_length":20,"output_length":3,"block_ids":[1]}
{"session":5,"timestamp_ms":0,"input_length":16,"output_length":3,"block_ids":[9]}
{"session":4,"timestamp_ms":1500,"input_length":40,"output_length":4,"block_ids":[1,2]}
{"session":4,"timestamp_ms":900,"input_length":36,"output_length":4,"block_ids":[1,3]}
"""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def calls_of(sessions: Sequence[Session]) -> list[Call]:
    return [call for session in sessions for call in session.calls]


def ids(call: Call) -> list[int]:
    return MAKER.token_ids(call.prompt)


# Random lengths


def test_lengths_are_written_as_a_number_a_range_or_a_lognormal_distribution() -> None:
    lengths = {"128": Fixed(128), "64-256": Uniform(64, 256), "lognormal:161:0.8": LogNormal(161, 0.8)}
    for text, length in lengths.items():
        assert parse(text) == length
        assert str(length) == text


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "9-3", "0-4", "many", "lognormal:8", "lognormal:0:1", "lognormal:8:inf"]
)
def test_an_invalid_length_is_refused_with_the_valid_forms(text: str) -> None:
    with pytest.raises(InvalidLengths, match="must be such as 128, 64-256 or lognormal:MEAN:SIGMA"):
        parse(text)


def test_drawn_lengths_have_the_requested_mean_and_range() -> None:
    random = np.random.default_rng(0)
    skewed = [LogNormal(161, 0.8).draw(random) for _ in range(20_000)]
    assert np.mean(skewed) == pytest.approx(161, rel=0.03)
    assert np.median(skewed) < 125
    assert {Uniform(3, 5).draw(random) for _ in range(100)} == {3, 4, 5}


def test_random_requests_are_the_same_for_the_same_seed_and_share_their_prefixes() -> None:
    workload = RandomLengths(Uniform(5, 9), Fixed(4), seed=1, prefix_tokens=32, prefixes=2)
    first, again = (list(islice(workload.sessions(), 40)) for _ in range(2))
    assert first == again
    assert first != list(islice(RandomLengths(Uniform(5, 9), Fixed(4), 2, 32, 2).sessions(), 40))
    prompts = [ids(call) for call in calls_of(first)]
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 2
    assert len({tuple(prompt[32:]) for prompt in prompts}) == 40
    assert {len(prompt) - 32 for prompt in prompts} == {5, 6, 7, 8, 9}


# Files of lengths


@pytest.mark.parametrize(
    "text",
    [
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n290,905,1195,0.3\n",
        "prompt_tokens,output_tokens\n74,918\n290,905\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,74,918\n2023-11-16 18:17:04.0319600,290,905\n",
    ],
)
def test_lengths_are_read_from_the_columns_of_published_files(tmp_path: Path, text: str) -> None:
    workload = Recorded(written(tmp_path, "lengths.csv", text))
    sessions = list(workload.sessions())
    calls = calls_of(sessions)
    assert [(call.input_tokens, call.output_tokens) for call in calls] == [(74, 918), (290, 905)]
    assert workload.has_times == ("TIMESTAMP" in text)
    assert sessions[1].start_seconds == pytest.approx(0.052 if workload.has_times else 0.0)
    assert len({tuple(ids(call)[:10]) for call in calls}) == 2


def traced(**changed: object) -> str:
    return json.dumps({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]} | changed)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("lengths.csv", "in,out\n1,2\n", "columns must be .*, not in,out"),
        ("lengths.csv", "prompt_tokens,output_tokens\n\n1,x\n", "line 3 is invalid: output_tokens must be .* not 'x'"),
        (
            "lengths.csv",
            "prompt_tokens,output_tokens\n-1,1\n",
            "line 2 is invalid: prompt_tokens must be between 0 and",
        ),
        ("lengths.csv", "prompt_tokens,output_tokens\n1\n", "line 2 is invalid: output_tokens must be .* not None"),
        ("lengths.csv", "prompt_tokens,output_tokens\n", "no rows"),
        ("trace.jsonl", '{"timestamp": 1}\n', "line 1 has no field input_length"),
        ("trace.jsonl", "\n{\n", "line 2 is invalid: Expecting"),
        ("trace.jsonl", "5\n", "line 1 is invalid: a row must be a JSON object, not 5"),
        ("trace.jsonl", traced(input_length=1e999), "line 1 is invalid: input_length must be .* not inf"),
        ("trace.jsonl", traced(timestamp="now"), "line 1 is invalid: timestamp must be .* not 'now'"),
        ("trace.jsonl", traced(hash_ids=[1, "x"]), "line 1 is invalid: hash_ids must be a list of integers, not"),
        ("trace.jsonl", traced(session="x"), "line 1 is invalid: session must be an integer, not 'x'"),
        ("trace.txt", "", "must end with .csv or .jsonl"),
    ],
)
def test_a_file_without_requests_is_refused_with_the_reason(tmp_path: Path, name: str, text: str, reason: str) -> None:
    with pytest.raises(InvalidFile, match=reason):
        rows.read(written(tmp_path, name, text))


def test_rows_are_limited_scaled_cut_and_skipped_in_this_order_and_reported(tmp_path: Path) -> None:
    text = "prompt_tokens,output_tokens\n" + "".join(f"{10 * number},{number}\n" for number in range(1, 11))
    path = written(tmp_path, "lengths.csv", text)
    workload = Recorded(path, Selection(limit=5, mean_input=60, cap_input=90, max_output=4))
    calls = calls_of(list(workload.sessions()))
    assert [(call.input_tokens, call.output_tokens) for call in calls] == [(20, 1), (40, 2), (60, 3), (80, 4)]
    assert workload.as_json() == {
        "kind": "recorded",
        "file": "lengths.csv",
        "file_rows": 10,
        "rows": 4,
        "rows_left_out": 1,
        "limit": 5,
        "mean_input": 60,
        "cap_input": 90,
        "max_output": 4,
    }
    with pytest.raises(InvalidSelection, match="no row is left"):
        list(Recorded(path, Selection(max_total=5)).sessions())


# Traces with blocks


def test_equal_blocks_have_equal_tokens_and_a_partial_last_block_is_unique(tmp_path: Path) -> None:
    sessions = list(Recorded(written(tmp_path, "trace.jsonl", MOONCAKE)).sessions())
    assert [session.start_seconds for session in sessions] == [0.0, 1.5, 2.0]
    early, late, third = (ids(call) for call in calls_of(sessions))
    assert [len(early), len(late), len(third)] == [1030, 1100, 512]
    assert early[:1024] == late[:1024]
    assert early[1024:] != late[1024:1030]
    assert third[:512] != early[:512]
    assert calls_of(sessions)[2].output_tokens == 1


def test_calls_are_grouped_by_session_in_order_of_their_times(tmp_path: Path) -> None:
    one, other = Recorded(written(tmp_path, "trace.jsonl", AGENTS)).sessions()
    assert [(call.offset_seconds, call.input_tokens) for call in one.calls] == [(0.0, 20), (0.9, 36), (1.5, 40)]
    assert len(other.calls) == 1
    first, second, third = (ids(call) for call in one.calls)
    assert first[:16] == second[:16] == third[:16]
    assert second[16:32] != third[16:32]


def test_copies_of_a_session_share_among_themselves_and_with_no_other_copy(tmp_path: Path) -> None:
    sessions = list(Recorded(written(tmp_path, "trace.jsonl", AGENTS), copies=3).sessions())
    assert [len(session.calls) for session in sessions] == [3, 1] * 3
    beginnings = [[tuple(ids(call)[:16]) for call in session.calls] for session in sessions]
    assert all(len(set(own)) == 1 for own in beginnings)
    assert len({own[0] for own in beginnings}) == 6


def test_a_trace_with_blocks_is_cut_but_not_scaled(tmp_path: Path) -> None:
    path = written(tmp_path, "trace.jsonl", MOONCAKE)
    call = next(Recorded(path, Selection(cap_input=600)).sessions()).calls[0]
    assert ids(call)[:512] == ids(next(Recorded(path).sessions()).calls[0])[:512]
    assert call.input_tokens == 600
    with pytest.raises(InvalidSelection, match="cannot be scaled"):
        list(Recorded(path, Selection(mean_input=100)).sessions())


@pytest.mark.parametrize(
    ("name", "calls"),
    [("sharegpt_8k_lengths.csv", 30_731), ("alpaca_lengths.csv", 999), ("azure_code.csv", 8_819)],
)
def test_published_length_files_are_read(name: str, calls: int) -> None:
    assert len(rows.read(data_file(name))) == calls


def test_prompts_of_the_agents_trace_share_nearly_all_their_blocks() -> None:
    """The data set's description states that 93 % of the blocks repeat."""
    calls = calls_of(list(Recorded(data_file("agent_sessions.jsonl")).sessions()))
    seen: set[tuple[int, ...]] = set()
    repeated = blocks = 0
    for call in calls:
        prompt = ids(call)
        for end in range(16, len(prompt) + 1, 16):
            block = tuple(prompt[end - 16 : end])
            repeated += block in seen
            blocks += 1
            seen.add(block)
    assert len(calls) == 100
    assert repeated / blocks == pytest.approx(0.93, abs=0.01)


def test_the_conversation_trace_has_the_lengths_of_its_description() -> None:
    sessions = list(Recorded(data_file("mooncake_conversation.jsonl"), Selection(limit=2000)).sessions())
    read = rows.read(data_file("mooncake_conversation.jsonl"))
    assert np.mean([row.input_tokens for row in read]) == pytest.approx(12_035, abs=1)
    assert [call.input_tokens for call in calls_of(sessions)] == [row.input_tokens for row in read[:2000]]
