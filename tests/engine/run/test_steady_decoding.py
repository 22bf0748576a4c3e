"""Inputs of a step that are changed in place equal those that are made anew."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.run.forward import ForwardPass
from engine.schedule.request import Sampling
from engine.schedule.step_plan import PENDING_TOKEN, Work

BLOCK = 4
GREEDY = Sampling(temperature=0.0)

Arrays = list[list[Any]]


class ReadInputs:
    """A decoder that keeps what it is given."""

    integers = np.int32

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def logits(self, *inputs: Any) -> torch.Tensor:
        *integers, batch = inputs
        self.tensors = [*integers, batch.slots, batch.first, batch.ends, batch.tables]
        return torch.zeros(len(inputs[2]), 8)

    @property
    def arrays(self) -> Arrays:
        return [one.tolist() for one in self.tensors]


class Decoding:
    """Two forward passes of the same work: one of them makes all inputs anew."""

    def __init__(self) -> None:
        self.decoder, self.plain = ReadInputs(), ReadInputs()
        backend: Any = None  # only copies of blocks use it, and there are none
        device = torch.device("cpu")
        self.passes = [ForwardPass(one, backend, BLOCK, device) for one in (self.decoder, self.plain)]

    def step(self, work: tuple[Work, ...], tokens: list[int]) -> None:
        self.passes[1]._steady = None
        for one in self.passes:
            one.logits(work)
            one.keep(work, torch.tensor(tokens, dtype=torch.int64))
        assert self.decoder.arrays == self.plain.arrays


def works(starts: dict[int, int], tables: dict[int, tuple[int, ...]], tokens: dict[int, tuple[int, ...]]) -> Any:
    return tuple([Work(one, tokens[one], starts[one], tables[one], True, GREEDY) for one in starts])


@given(data=st.data())
def test_inputs_of_any_steps_are_those_that_are_made_anew(data: st.DataObject) -> None:
    decoding, blocks = Decoding(), iter(range(1, 10_000))
    starts: dict[int, int] = {}
    tables: dict[int, tuple[int, ...]] = {}
    sampled: dict[int, int] = {}
    for number in range(data.draw(st.integers(2, 20))):
        change = data.draw(st.sampled_from(["none", "none", "none", "add", "drop", "copy", "chunk", "extend"]))
        if change == "add" or not starts:
            starts[number], tables[number] = data.draw(st.integers(0, 9)), ()
        one = data.draw(st.sampled_from([*starts]))
        if change == "drop" and len(starts) > 1:
            del starts[one]
        own = {name: (data.draw(st.integers(0, 7)),) for name in starts}
        if change == "chunk" and one in starts:
            own[one] *= 3
        if data.draw(st.booleans()):  # planned ahead
            own = {name: PENDING_TOKEN if name in sampled and len(own[name]) == 1 else own[name] for name in own}
        for name, start in starts.items():
            needed = (start + len(own[name]) - 1) // BLOCK + 1 + (change == "extend")
            tables[name] = tables[name] if len(tables[name]) >= needed else _filled(tables[name], needed, blocks)
            if change == "copy" and name == one:  # its blocks were shared
                tables[name] = tuple([next(blocks) for _ in tables[name]])
        drawn = [data.draw(st.integers(0, 7)) for _ in starts]
        decoding.step(works(starts, tables, own), drawn)
        sampled = dict(zip(starts, drawn, strict=True))
        starts = {name: start + len(own[name]) for name, start in starts.items()}


def _filled(table: tuple[int, ...], blocks: int, numbers: Any) -> tuple[int, ...]:
    return (*table, *[next(numbers) for _ in range(blocks - len(table))])


def test_steps_of_the_same_sequences_have_the_same_tensors() -> None:
    decoding = Decoding()
    tables = {1: (7, 8, 9), 2: (3, 4, 5)}
    decoding.step(works({1: 2, 2: 6}, tables, {1: (5,), 2: (6,)}), [1, 2])
    first = decoding.decoder.tensors
    for place in range(1, 5):
        pending = dict.fromkeys((1, 2), PENDING_TOKEN)
        decoding.step(works({1: 2 + place, 2: 6 + place}, tables, pending), [1, 2])
    assert all(one is other for one, other in zip(first, decoding.decoder.tensors, strict=True))


def test_a_step_that_failed_halfway_is_not_continued() -> None:
    decoding = Decoding()
    decoding.step(works({1: 3}, {1: (7, 8)}, {1: (5,)}), [1])
    with pytest.raises(IndexError):
        decoding.passes[0].logits(works({1: 4}, {1: (7,)}, {1: (5,)}))  # its block is missing
    decoding.step(works({1: 5}, {1: (7, 8)}, {1: (5,)}), [1])
