"""Whoever follows KV events: the keys of each place, with checks that the events are in an order that all can apply."""

from array import array
from collections import defaultdict

from blocks import block_key
from services.engine.events.changes import Cleared, KeyPlace, Removed, Stored


class FollowedKeys:
    """Applies changes. `strict` checks that parents are known, and that only known keys are removed."""

    def __init__(self, strict=True):
        self.places: dict[KeyPlace, set[bytes]] = defaultdict(set)
        self.parents: dict[bytes, bytes | None] = {}
        self.strict = strict

    def apply(self, changes):
        for change in changes:
            if isinstance(change, Cleared):
                self.places.clear()
            elif isinstance(change, Stored):
                self._store(change)
            else:
                self._remove(change)

    def of_kind(self, kind):
        return set().union(*(keys for place, keys in self.places.items() if place.kind == kind))

    def _store(self, change: Stored):
        assert change.keys
        assert len(change.keys) == len(change.tokens)
        parent = change.parent
        if self.strict and parent is not None and change.place.kind == 0:
            assert parent in self.of_kind(0), "parents come first"
        for key, tokens in zip(change.keys, change.tokens, strict=True):
            assert parent is None or block_key(parent, array("i", tokens)) == key, (
                "a key is the hash of its parent and its tokens"
            )
            self.parents[key] = parent
            self.places[change.place].add(key)
            parent = key

    def _remove(self, change: Removed):
        for key in change.keys:
            assert not self.strict or key in self.places[change.place], "only announced keys are removed"
            self.places[change.place].discard(key)
            left = self.of_kind(0)
            if self.strict and change.place.kind == 0 and key not in left:
                assert not any(self.parents[one] == key for one in left), "children go first"
