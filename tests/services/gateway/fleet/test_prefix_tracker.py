from services.gateway.fleet.prefix_tracker import PrefixTracker


def test_what_was_sent_counts_as_cached_until_the_pool_has_no_room_for_it() -> None:
    sent = PrefixTracker(blocks=4)
    first, second, third = ([name + bytes([n]) for n in range(3)] for name in (b"a", b"b", b"c"))
    sent.add(first)
    assert sent.expected_blocks(first) == 3
    sent.add(second)
    assert sent.expected_blocks(second) == 3
    assert sent.expected_blocks(first) == 1, "the tail goes before the head"
    sent.add(third)
    assert (sent.expected_blocks(first), sent.expected_blocks(second), sent.expected_blocks(third)) == (0, 1, 3)


def test_live_requests_add_to_what_is_known_and_ended_ones_do_not() -> None:
    sent = PrefixTracker(blocks=100)
    keys = [bytes([n]) for n in range(5)]
    sent.add(keys[:3])
    sent.add(keys)
    assert sent.confirmed_blocks(keys, 0) == 5
    sent.remove(keys)
    assert sent.confirmed_blocks(keys, 0) == 3
    assert sent.confirmed_blocks(keys, 4) == 4
    sent.remove(keys[:3])
    assert sent.confirmed_blocks(keys, 0) == 0
    assert sent.expected_blocks(keys) == 5, "memory goes on"
