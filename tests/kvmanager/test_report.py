"""Adoption of reports, and refusals of contradictory ones."""

import copy
import random
from dataclasses import replace

import pytest

from blocks import Allocate, Commit, Condemn, CondemnReason, Extend, Fork, Free, FreeReason, Pin, Reset, Step, Unpin
from kvmanager import InvalidReport, Pool, PoolReport, PoolSpec, adopt, report_of
from kvmanager.effects import effect_of
from tests.kvmanager.tiny_pools import end_of

SIZE = 2


def spec(device_blocks=12, host_blocks=6):
    return PoolSpec("engine", 1, "model", SIZE, device_blocks, host_blocks)


def adopted(spec_, report):
    return end_of(adopt(spec_, report))


def random_step(pool, draw, number):  # noqa: C901  (a case for each verb)
    """Return a Step of a few random items, most of them valid."""
    items = {
        name: [] for name in ("commits", "pins", "forks", "frees", "swap_outs", "swap_ins", "extends", "allocates")
    }
    lengths = []
    for sequence in pool.sequences.values():
        match draw.choice(("commit", "extend", "fork", "free", "swap", "pin", "length", "nothing")):
            case "commit" if sequence.room_tokens // SIZE > sequence.committed_blocks:
                tokens = [
                    draw.randint(0, 1) for _ in range((sequence.room_tokens // SIZE - sequence.committed_blocks) * SIZE)
                ]
                items["commits"].append(Commit(sequence.id, sequence.committed_blocks, tokens))
            case "extend":
                items["extends"].append(
                    Extend(sequence.group, [(sequence.id, sequence.room_tokens + draw.randint(1, 3))])
                )
            case "fork":
                items["forks"].append(
                    Fork(sequence.id, number * 10 + len(items["forks"]), draw.randint(1, sequence.room_tokens))
                )
            case "free":
                items["frees"].append(Free(sequence.id, FreeReason.FINISHED))
            case "swap":
                items["swap_ins" if sequence.swapped else "swap_outs"].append(sequence.group)
            case "pin" if pool.state.pins and draw.random() < 0.5:
                items["pins"].append(Unpin(draw.choice(sorted(pool.state.pins))))
            case "pin" if sequence.committed_blocks:
                items["pins"].append(Pin(f"pin-{number}-{sequence.id}", sequence.id, sequence.committed_blocks))
            case "length":
                lengths.append((sequence.id, draw.randint(0, sequence.room_tokens)))
    if draw.random() < 0.1:
        items["pins"].append(Reset())
    condemns = random_condemns(pool, draw) if draw.random() < 0.05 else []
    prompt = [draw.randint(0, 1) for _ in range(draw.randint(1, 7))]
    items["allocates"].append(Allocate(number * 10 + 9, number * 10 + 9, "request", b"salt", prompt, len(prompt)))
    return Step(number, lengths=lengths, condemns=condemns, **items)


def random_condemns(pool, draw):
    """Return a condemn of one or two blocks, unless many blocks are withheld already."""
    host = pool.host.total > 0 and draw.random() < 0.5
    tier = pool.host if host else pool.device
    if 6 * sum(map(tier.marks.is_withheld_or_marked, range(tier.total + 1))) >= tier.total:
        return []
    blocks = [draw.randint(1, tier.total) for _ in range(draw.randint(1, 2))]
    return [Condemn(draw.choice([0, *pool.sequences]), blocks, draw.choice(list(CondemnReason)), host)]


@pytest.mark.parametrize("seed", range(150))
def test_adopting_a_pools_report_gives_an_equal_pool_with_equal_answers(seed):
    draw = random.Random(seed)
    pool = Pool(spec())
    for number in range(1, draw.randint(2, 25)):
        if draw.random() < 0.05:
            pool.withhold([draw.randint(1, pool.device.total)], [draw.randint(1, pool.host.total)])
        pool.apply(random_step(pool, draw, number))
    again = adopted(spec(), report_of(pool))
    assert again.violations() == []
    assert report_of(again) == report_of(pool)
    for number in range(100, 115):
        step = random_step(pool, draw, number)
        assert again.apply(step) == pool.apply(step)
        assert report_of(again) == report_of(pool)
    assert again.violations() == []


def with_outlived(pool):
    """Return the report of a pool whose keyed blocks an earlier process computed."""
    report = report_of(pool)
    for tier in (report.device, report.host):
        tier.outlived = sorted(tier.keyed)
    return report


def test_hits_of_blocks_that_outlived_their_engine_are_counted():
    pool = Pool(spec())
    pool.apply(Step(1, allocates=[Allocate(1, 1, "first", b"", [1, 2, 3, 4, 5], 5)]))
    pool.apply(Step(2, commits=[Commit(1, 0, [1, 2, 3, 4])], frees=[Free(1, FreeReason.FINISHED)]))
    again = adopted(spec(), with_outlived(pool))
    applied = again.apply(Step(3, allocates=[Allocate(2, 2, "again", b"", [1, 2, 3, 4, 6, 7], 6)]))
    (allocated,) = [effect_of(effect) for effect in applied.effects]
    assert allocated.allocation.hit_blocks == allocated.allocation.outlived_blocks == 2
    applied = again.apply(Step(4, commits=[Commit(2, 2, [6, 7])], allocates=[Allocate(3, 3, "own", b"", [1] * 9, 9)]))
    assert effect_of(applied.effects[-1]).allocation.outlived_blocks == 0


@pytest.mark.parametrize("seed", range(30))
def test_a_block_has_outlived_its_engine_until_it_loses_its_key(seed):
    draw = random.Random(seed)
    pool = Pool(spec())
    for number in range(1, 15):
        pool.apply(random_step(pool, draw, number))
    again = adopted(spec(), with_outlived(pool))
    before = {tier: dict(enumerate(tier.keys.by_block)) for tier in (again.device, again.host)}
    marked = {tier: set(tier.keys.outlived) for tier in before}
    for number in range(100, 130):
        again.apply(random_step(again, draw, number))
        assert again.violations() == []
        for tier, blocks in marked.items():
            assert tier.keys.outlived <= blocks
            kept = {block for block in blocks if tier.key(block) == before[tier][block]}
            assert tier.keys.outlived <= kept
            blocks &= tier.keys.outlived
        assert report_of(adopted(spec(), report_of(again))) == report_of(again)


def mutate(report, draw):  # noqa: C901  (a case for each change)
    """Change one value of a report: a number, a block, a key, or a position."""
    lists = [sequence.block_ids for sequence in report.sequences] + list(report.pins.values())
    for tier in (report.device, report.host):
        lists += [tier.release_order, tier.withheld, tier.outlived]
    blocks = draw.choice(lists)
    keyed = draw.choice([report.device.keyed, report.device.unindexed, report.host.keyed, report.host.unindexed])
    match draw.randint(0, 9):
        case 0:
            blocks.insert(draw.randint(0, len(blocks)), draw.randint(-1, 13))
        case 1 if blocks:
            blocks.pop(draw.randrange(len(blocks)))
        case 2 if blocks:
            blocks[draw.randrange(len(blocks))] = draw.randint(-1, 13)
        case 3:
            draw.shuffle(blocks)
        case 4:
            keyed[draw.randint(0, 13)] = bytes([draw.randint(1, 3)] * draw.choice((32, 32, 32, 31)))
        case 5 if keyed:
            del keyed[draw.choice(list(keyed))]
        case 6:
            report.pins[draw.choice(("", "new"))] = [draw.randint(1, 12) for _ in range(draw.randint(0, 3))]
        case 7:
            setattr(report, draw.choice(("resets", "last_step")), draw.randint(-2, 3))
        case _ if report.sequences:
            one = draw.choice(report.sequences)
            names = (
                "sequence",
                "group",
                "resets",
                "prompt_tokens",
                "room_tokens",
                "computed_tokens",
                "committed_blocks",
            )
            what = draw.choice((*names, "swapped", "request_id", "salt", "copy"))
            if what == "copy":
                report.sequences.append(replace(one, sequence=900, group=draw.choice((one.group, 901))))
            else:
                values = {"swapped": not one.swapped, "request_id": "another", "salt": b"other"}
                number = draw.choice(
                    (-1, 0, 1, 2, 2**31 - 1, getattr(one, what) + draw.choice((-1, 1)) if what in names else 0)
                )
                setattr(one, what, values.get(what, number))


def canonical(report):
    """A report in canonical order: equal keys in order of sealing, free blocks apart from cached ones."""
    tiers = []
    for tier in (report.device, report.host):
        carriers = {}
        for block, key in tier.keyed.items():
            carriers.setdefault(key, []).append(block)
        order = [[block for block in tier.release_order if (block in tier.keyed) is keyed] for keyed in (False, True)]
        tiers.append((carriers, tier.unindexed, order, sorted(tier.withheld), {*tier.outlived}))
    sequences = sorted(report.sequences, key=lambda sequence: sequence.sequence)
    return tiers, sequences, report.pins, report.resets, report.last_step


@pytest.mark.parametrize("seed", range(40))
def test_a_changed_report_is_refused_or_gives_a_valid_pool_with_that_report(seed):
    draw = random.Random(seed)
    pool = Pool(spec())
    for number in range(1, draw.randint(2, 12)):
        if draw.random() < 0.05:
            pool.withhold([draw.randint(1, pool.device.total)], [])
        pool.apply(random_step(pool, draw, number))
    for _ in range(60):
        report = copy.deepcopy(report_of(pool))
        for _ in range(draw.randint(1, 3)):
            mutate(report, draw)
        expected = copy.deepcopy(canonical(report))
        try:
            again = adopted(spec(), report)
        except InvalidReport:
            continue
        assert again.violations() == []
        assert canonical(report_of(again)) == expected
        again.apply(Step(again.last_step + 1, frees=[Free(one, FreeReason.FAILED) for one in list(again.sequences)]))
        assert again.violations() == []
        assert again.device.counts.held == len({block for blocks in again.state.pins.values() for block in blocks})


def test_an_empty_report_gives_an_empty_pool(state_of):
    assert state_of(adopted(spec(), PoolReport())) == state_of(Pool(spec()))
    assert adopted(spec(), PoolReport(last_step=7)).last_step == 7


def test_a_large_pool_is_adopted_in_slices():
    pauses = sum(1 for _ in adopt(spec(100_000), PoolReport()))
    assert pauses >= 40


@pytest.fixture
def report():
    """The report of a pool with a sequence, a swapped one, a pin, and cached and free blocks in both tiers."""
    pool = Pool(spec())
    pool.apply(
        Step(1, allocates=[Allocate(1, 1, "a", b"", [1, 0, 1, 0, 1], 5), Allocate(2, 2, "b", b"", [0, 0, 0], 3)])
    )
    pool.apply(Step(2, commits=[Commit(1, 0, [1, 0, 1, 0]), Commit(2, 0, [0, 0])], swap_outs=[2]))
    pool.apply(Step(3, pins=[Pin("pin", 1, 1)], allocates=[Allocate(3, 3, "c", b"", [1, 1, 1], 3)]))
    pool.apply(Step(4, commits=[Commit(3, 0, [1, 1])], frees=[Free(3, FreeReason.FINISHED)]))
    return report_of(pool)


def first(report, **changes):
    report.sequences[0] = replace(report.sequences[0], **changes)


CONTRADICTIONS = {
    "is listed in two states": lambda report: report.device.release_order.append(report.sequences[0].block_ids[0]),
    "device: 1 block missing from tables and release order": lambda report: report.device.release_order.pop(),
    "host: 1 block missing from tables": lambda report: report.host.release_order.pop(),
    "device block must be between 1 and 12, not 13": lambda report: report.device.release_order.append(13),
    "device block must be between 1 and 12, not 0": lambda report: first(report, block_ids=[0]),
    "host block must be between 1 and 6, not 7": lambda report: report.host.withheld.append(7),
    "has two keys": lambda report: report.device.unindexed.update(report.device.keyed),
    "or an invalid one": lambda report: report.device.keyed.update({report.device.release_order[0]: b"short"}),
    "a committed block has no key": lambda report: first(report, committed_blocks=3),
    "blocks for 9 tokens": lambda report: first(report, room_tokens=9),
    "has 7 of 6 tokens computed": lambda report: first(report, computed_tokens=7),
    "listed twice, or is not a valid id": lambda report: first(report, sequence=2),
    "shares block 3, which has no key": lambda report: report.sequences.append(
        replace(report.sequences[0], sequence=9, group=9)
    ),
    "or a block twice": lambda report: report.pins.update(pin=[1, 1]),
    "last_applied_step must be at least 0, not -1": lambda report: setattr(report, "last_step", -1),
    "has -4 prompt tokens": lambda report: first(report, prompt_tokens=-4),
    "partly swapped out": lambda report: first(report, group=2),
    "is listed as unindexed, but is in no table": lambda report: report.device.unindexed.update(
        {report.device.release_order[0]: bytes(32)}
    ),
    "resets must be at least 0, not -1": lambda report: setattr(report, "resets", -1),
    "resets must be between 0 and 0, not 1": lambda report: first(report, resets=1),
    "is listed as outlived, but has no key": lambda report: report.device.outlived.append(
        report.sequences[0].block_ids[2]
    ),
    "a block without a key": lambda report: report.pins.update(other=[report.sequences[0].block_ids[2]]),
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_a_contradictory_report_is_refused_with_its_position(report, message):
    adopted(spec(), report)
    CONTRADICTIONS[message](report)
    with pytest.raises(InvalidReport, match=message):
        adopted(spec(), report)
