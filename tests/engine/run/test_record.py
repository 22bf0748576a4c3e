"""A record of requests has their shared prefixes but not their tokens."""

from dataclasses import replace
from itertools import count

from engine.run.record import RecordSettings, RequestsRecord
from engine.run.replay import STOP_TOKEN, SyntheticTokens
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits
from engine.schedule.request import FinishReason, Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence_group import Group

SIZE = 4
SECRET = b"s" * 32
PROMPT = [7001, 7002, 7003, 7004, 7005, 7006, 7007, 7008, 7009, 7010]


def recorded(prompt, output=(), *, number=1, salt=b"", secret=SECRET, temperature=0.0):
    scheduler = Scheduler(Capacity(100_000, 100_000, SIZE, 64), Limits(32, 8))
    request = Request(f"r{number}", tuple(prompt), Sampling(temperature), Stopping(20), salt, priority=3)
    group = Group.of(request, count(number))
    group.members[0].tokens += output
    group.members[0].finish = FinishReason.STOP
    (one,) = RequestsRecord(scheduler, secret).describe(group, 5, 9)
    return one


def test_a_request_is_recorded_as_keys_and_lengths():
    one = recorded(PROMPT, [7011, 7012])
    assert len(one.keys) == 3  # the output fills the last one
    assert (one.number, one.arrival_step, one.end_step) == (1, 5, 9)
    assert (one.prompt_tokens, one.output_tokens, one.max_tokens) == (10, 2, 20)
    assert (one.decoding, one.priority, one.finish) == ("greedy", 3, "stop")
    assert recorded(PROMPT, temperature=0.5).decoding == "sampled"


def test_equal_prefixes_with_equal_salt_have_equal_keys():
    keys = recorded(PROMPT).keys
    assert recorded(PROMPT[:9]).keys == keys
    assert recorded([*PROMPT[:4], 1, *PROMPT[5:]]).keys[0] == keys[0]
    assert recorded([*PROMPT[:4], 1, *PROMPT[5:]]).keys[1] != keys[1]
    assert not set(recorded([1, *PROMPT[1:]]).keys) & set(keys)
    assert not set(recorded(PROMPT, salt=b"tenant").keys) & set(keys)


def test_a_record_is_keys_numbers_and_words_that_do_not_depend_on_the_tokens():
    one, other = recorded(PROMPT, [7011]), recorded([token + 500 for token in PROMPT], [7511])
    assert not set(one.keys) & set(other.keys)
    assert replace(one, keys=other.keys) == other


def test_keys_do_not_show_which_tokens_differ():
    """Packed tokens, also with a secret added to each of them, would differ in the bits in which the tokens do."""
    keys, other = recorded(PROMPT).keys, recorded([PROMPT[0] ^ 1, *PROMPT[1:]]).keys
    assert all((key ^ different).bit_count() > 8 for key, different in zip(keys, other, strict=True))


def test_keys_of_a_record_depend_on_the_secret():
    assert not set(recorded(PROMPT, secret=b"t" * 32).keys) & set(recorded(PROMPT).keys)


def test_a_record_has_the_settings_of_the_engine():
    scheduler = Scheduler(Capacity(1000, 1000, SIZE, 64), Limits(32, 8))
    assert RequestsRecord(scheduler, SECRET).settings == RecordSettings(SIZE, 64, token_budget=32, max_sequences=8)


def test_synthetic_tokens_are_equal_where_keys_are_equal():
    tokens = SyntheticTokens(SIZE)
    one = tokens.of(recorded(PROMPT))
    alike = tokens.of(recorded(PROMPT[:9]))
    other = tokens.of(recorded([*PROMPT[:4], 1, *PROMPT[5:]]))
    assert (len(one), len(alike), len(other)) == (10, 9, 10)
    assert alike[:8] == one[:8]
    assert not set(alike[8:]) & set(one)  # a partial block has no key
    assert other[:4] == one[:4]
    assert not set(other[4:]) & set(one)
    assert STOP_TOKEN not in {*one, *alike, *other}
