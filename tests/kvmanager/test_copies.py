"""Random Steps executed on a small tensor: every sequence reads its own tokens through its table."""

import copy
from dataclasses import dataclass, field

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from blocks import (
    Allocate,
    Commit,
    Condemn,
    CondemnReason,
    Extend,
    Fork,
    Free,
    FreeReason,
    Pin,
    Reset,
    Step,
    StepItem,
    StepRefusal,
    Unpin,
    block_key,
    root_key,
)
from kvmanager import Pool, PoolSpec
from tests.kvmanager.random_runs import random_runs

SIZE = 2
PLANS = ["extend", "extend", "extend", "commit", "commit", "fork", "fork", "free", "pin", "swap out"]
SWAPPED_PLANS = ["swap in", "swap in", "swap in", "free", "nothing"]
LISTS = ("condemns", "commits", "pins", "forks", "frees", "swap_outs", "swap_ins", "extends", "allocates")
FOR_LACK_OF_SPACE = {
    (StepItem.PIN, StepRefusal.PIN_TOO_LARGE),
    (StepItem.SWAP_OUT, StepRefusal.OUT_OF_BLOCKS),
    (StepItem.SWAP_IN, StepRefusal.OUT_OF_BLOCKS),
    (StepItem.EXTEND, StepRefusal.OUT_OF_BLOCKS),
    (StepItem.ALLOCATE, StepRefusal.OUT_OF_BLOCKS),
}


@dataclass
class Twin:
    """A sequence as a list of tokens, without blocks. `todo` is the rest of its prompt."""

    group: int
    root: tuple  # number of resets, and the salt
    tokens: list[int] = field(default_factory=list)
    todo: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)  # from answers alone
    room: int = 0
    committed: int = 0
    swapped: bool = False


class Executed(RuleBasedStateMachine):
    """A small engine. A slot has the inputs of K and V at its position: the root and all tokens up to it."""

    @initialize(blocks=st.sampled_from([3, 3, 4, 4, 5, 6, 7, 8]), host_blocks=st.integers(0, 4))
    def begin(self, blocks, host_blocks):
        self.pool = Pool(PoolSpec("engine", 1, "model", SIZE, blocks, host_blocks))
        self.device, self.host = ([[None] * SIZE for _ in range(total + 1)] for total in (blocks, host_blocks))
        self.sequences = {}
        self.pins = {}  # contents of each, as a sequence
        self.resets = 0
        self.last_id = 0

    @rule(data=st.data(), prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), max_size=2))
    def step(self, data, prompts):
        items = {name: [] for name in LISTS}
        children, ended, pinned = self.plan(data.draw, items)
        asked = {}
        for prompt in prompts:
            self.last_id += 1
            salt = data.draw(st.sampled_from([b"", b"", b"salt"]), "salt")
            compute = data.draw(st.integers(1, len(prompt)), "compute")
            items["allocates"].append(Allocate(self.last_id, self.last_id, "request", salt, prompt, compute))
            asked[self.last_id] = Twin(self.last_id, (self.resets, salt), todo=list(prompt))
        step = Step(self.pool.last_step + 1, **items)
        applied = self.pool.apply(step)
        refused = applied.result.refused
        self.check_refusals(step, applied.result.refusals)
        self.sequences |= children
        for sequence in ended:
            del self.sequences[sequence]
        for position, prefix in pinned.items():
            if (StepItem.PIN, position) not in refused:
                self.pins[step.pins[position].pin_id] = prefix
        for kind, groups in ((StepItem.SWAP_OUT, step.swap_outs), (StepItem.SWAP_IN, step.swap_ins)):
            self.swap([group for position, group in enumerate(groups) if (kind, position) not in refused])
        self.follow(applied, asked)
        self.copy(data.draw, applied)
        self.compute(data.draw)
        self.check()

    def plan(self, draw, items):
        """Draw an action for each sequence; extends and swaps are one item per group."""
        children, ended, pinned, rooms, swaps = {}, [], {}, {}, set()
        self.plan_condemns(draw, items)
        self.plan_pins(draw, items)
        for number, sequence in sorted(self.sequences.items()):
            what = draw(st.sampled_from(SWAPPED_PLANS if sequence.swapped else PLANS), "plan")
            written = len(sequence.tokens)
            if what == "commit" and written // SIZE > sequence.committed:
                last = draw(st.integers(sequence.committed + 1, written // SIZE), "blocks")
                tokens = sequence.tokens[sequence.committed * SIZE : last * SIZE]
                items["commits"].append(Commit(number, sequence.committed, tokens))
                sequence.committed = last
            elif what == "pin" and sequence.committed:
                count = draw(st.integers(1, sequence.committed), "pinned")
                self.last_id += 1
                pinned[len(items["pins"])] = Twin(0, sequence.root, sequence.tokens[: count * SIZE])
                items["pins"].append(Pin(str(self.last_id), number, count))
            elif what == "fork" and written:
                self.last_id += 1
                length = draw(st.integers(max(1, written - 3), written), "length")
                items["forks"].append(Fork(number, self.last_id, length))
                children[self.last_id] = self.cut(sequence, length)
                writers = [self.last_id, number]
                if draw(st.booleans(), "replace"):
                    items["frees"].append(Free(number, FreeReason.PRUNED))
                    ended.append(writers.pop())
                if draw(st.booleans(), "continue"):
                    rooms.setdefault(sequence.group, []).extend((writer, length + 1) for writer in writers)
            elif what == "free":
                items["frees"].append(Free(number, FreeReason.FINISHED))
                ended.append(number)
            elif what == "extend":
                room = draw(st.integers(sequence.room, sequence.room + 3), "room")
                rooms.setdefault(sequence.group, []).append((number, room))
            elif what in ("swap out", "swap in"):
                swaps.add((what, sequence.group))
        items["extends"] = [Extend(group, draw(st.permutations(members))) for group, members in rooms.items()]
        self.plan_swaps(draw, items, swaps, {**self.sequences, **children}, ended)
        return children, ended, pinned

    def plan_condemns(self, draw, items):
        """Rarely condemn a block of either tier. Sequences that hold it go on reading it."""
        if draw(st.integers(0, 31), "condemn") == 31:
            host = len(self.host) > 1 and draw(st.booleans(), "host")
            block = draw(st.integers(1, len(self.host if host else self.device) - 1), "block")
            items["condemns"].append(Condemn(0, [block], CondemnReason.HIT, host))
            event("condemn")

    def plan_pins(self, draw, items):
        """Sometimes unpin or reset, before the pins of the list."""
        for pin_id in sorted(self.pins):
            if draw(st.integers(0, 3), "unpin") == 3:
                items["pins"].append(Unpin(pin_id))
                del self.pins[pin_id]
        if draw(st.integers(0, 31), "reset") == 31:
            items["pins"].append(Reset())
            self.resets += 1
            event("reset")

    def plan_swaps(self, draw, items, swaps, sequences, ended):
        """Swap whole live groups. A group swapped out and in by one Step may also grow."""
        live = {sequence.group for number, sequence in sequences.items() if number not in ended}
        for what, group in sorted(swaps):
            if group in live:
                items[what.replace(" ", "_") + "s"].append(group)
        stay = set(items["swap_outs"])
        for group in sorted(stay):
            if draw(st.booleans(), "and back"):
                items["swap_ins"].append(group)
                stay.remove(group)
        items["extends"] = [extend for extend in items["extends"] if extend.group not in stay]

    def check_refusals(self, step, refusals):
        """Check that items are refused for lack of space or because a swap before them was."""
        for item, position, reason, _ in refusals:
            if reason is StepRefusal.INVALID:
                assert item in (StepItem.SWAP_IN, StepItem.EXTEND)
                group = step.swap_ins[position] if item is StepItem.SWAP_IN else step.extends[position].group
                assert group in step.swap_outs
                assert group in step.swap_ins
            else:
                assert (item, reason) in FOR_LACK_OF_SPACE

    def cut(self, sequence, length):
        """Cut the parent as a fork does, and return the equal child."""
        sequence.tokens = sequence.tokens[:length]
        sequence.todo = []
        sequence.committed = min(sequence.committed, length // SIZE)
        return Twin(sequence.group, sequence.root, list(sequence.tokens), committed=sequence.committed)

    def swap(self, groups):
        for sequence in self.sequences.values():
            sequence.swapped ^= sequence.group in groups

    def follow(self, applied, asked):
        for change in applied.result.tables:
            if change.sequence in asked:
                sequence = self.sequences[change.sequence] = asked[change.sequence]
                sequence.tokens = sequence.todo[: change.cached_tokens]
                sequence.todo = sequence.todo[change.cached_tokens :]
                sequence.committed = change.cached_tokens // SIZE
            if change.sequence in self.sequences:
                sequence = self.sequences[change.sequence]
                sequence.table[change.first_index :] = change.block_ids
                sequence.room = change.room_tokens

    def copy(self, draw, applied):
        """Run the lists in order, the pairs of each in random order; check that the order has no effect."""
        device, host = copy.deepcopy((self.device, self.host))
        for name, tiers, twins in (
            ("device_to_host", (self.device, self.host), (device, host)),
            ("host_to_device", (self.host, self.device), (host, device)),
            ("copies", (self.device, self.device), (device, device)),
        ):
            pairs = getattr(applied.result, name)
            for order, (sources, destinations) in ((draw(st.permutations(pairs), name), tiers), (pairs, twins)):
                for source, destination in order:
                    destinations[destination] = list(sources[source])
            if pairs:
                event(name if len(pairs) == 1 else f"{name}: several")
        assert (self.device, self.host) == (device, host)

    def compute(self, draw):
        """Write random tokens into the room of each sequence."""
        for sequence in self.sequences.values():
            most = 0 if sequence.swapped else sequence.room - len(sequence.tokens)
            for _ in range(draw(st.integers(0, most), "written")):
                position = len(sequence.tokens)
                sequence.tokens.append(sequence.todo.pop(0) if sequence.todo else draw(st.integers(0, 1), "token"))
                block, slot = sequence.table[position // SIZE], position % SIZE
                self.device[block][slot] = (*sequence.root, *sequence.tokens)

    def check(self):
        assert self.pool.violations() == []
        for number, sequence in self.sequences.items():
            assert self.pool.sequences[number].table == sequence.table
            self.check_reads(self.host if sequence.swapped else self.device, sequence.table, sequence)
        for pin_id, pinned in self.pins.items():
            self.check_reads(self.device, self.pool.state.pins[pin_id], pinned)
        for tier, tensor in ((self.pool.device, self.device), (self.pool.host, self.host)):
            for block in range(1, len(tensor)):
                if tier.key(block) is not None:
                    assert tier.key(block) == key_of(tensor[block])

    def check_reads(self, tensor, table, sequence):
        positions = range(len(sequence.tokens))
        read = [tensor[table[position // SIZE]][position % SIZE] for position in positions]
        assert read == [(*sequence.root, *sequence.tokens[: position + 1]) for position in positions]

    def teardown(self):
        frees = [Free(number, FreeReason.FINISHED) for number in self.sequences]
        self.pool.apply(Step(self.pool.last_step + 1, pins=[Unpin(pin_id) for pin_id in self.pins], frees=frees))
        assert self.pool.device.counts.held == self.pool.host.counts.held == 0


def key_of(slots):
    """Compute the key of a block of these contents; None if its slots are of different prefixes."""
    resets, salt, *tokens = slots[-1]
    if slots != [(resets, salt, *tokens[: len(tokens) - SIZE + slot + 1]) for slot in range(SIZE)]:
        return None
    key = root_key("model", salt, resets)
    for start in range(0, len(tokens), SIZE):
        key = block_key(key, tokens[start : start + SIZE])
    return key


Executed.TestCase.settings = random_runs(examples=100, steps=20)
TestEverySequenceReadsItsOwnTokens = Executed.TestCase
