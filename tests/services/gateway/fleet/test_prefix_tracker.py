from services.gateway.fleet.prefix_tracker import PrefixTracker


def test_sent_prefixes_are_expected_until_evicted_from_the_pool() -> None:
    tracker = PrefixTracker(blocks=4)
    first, second, third = ([name + bytes([n]) for n in range(3)] for name in (b"a", b"b", b"c"))
    tracker.add(first)
    assert tracker.expected_blocks(first) == 3
    tracker.add(second)
    assert tracker.expected_blocks(second) == 3
    assert tracker.expected_blocks(first) == 1, "the tail is evicted before the head"
    tracker.add(third)
    assert [tracker.expected_blocks(keys) for keys in (first, second, third)] == [0, 1, 3]


def test_live_requests_extend_the_confirmed_prefix_and_ended_ones_do_not() -> None:
    tracker = PrefixTracker(blocks=100)
    keys = [bytes([n]) for n in range(5)]
    tracker.add(keys[:3])
    tracker.add(keys)
    assert tracker.confirmed_blocks(keys, 0) == 5
    tracker.remove(keys)
    assert tracker.confirmed_blocks(keys, 0) == 3
    assert tracker.confirmed_blocks(keys, 4) == 4
    tracker.remove(keys[:3])
    assert tracker.confirmed_blocks(keys, 0) == 0
    assert tracker.expected_blocks(keys) == 5, "the LRU keeps them"
