"""Random Steps executed on a small tensor: what a sequence reads through its table are its own tokens, always."""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvmanager import (
    Allocate,
    Commit,
    Extend,
    Fork,
    Free,
    FreeReason,
    Pool,
    PoolSpec,
    Step,
    StepItem,
    block_key,
    root_key,
)

SIZE = 2
PLANS = ["extend", "extend", "extend", "commit", "commit", "fork", "fork", "free", "nothing"]


@dataclass
class Twin:
    """A sequence as a plain list of tokens: no blocks, nothing shared. `todo` is what is left of its prompt."""

    group: int
    salt: bytes
    tokens: list[int] = field(default_factory=list)
    todo: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)  # the engine's mirror, from answers alone
    room: int = 0
    committed: int = 0


class Executed(RuleBasedStateMachine):
    """An engine in small. A slot holds what K and V at its position depend on: the salt and all tokens up to it."""

    @initialize(blocks=st.integers(3, 8))
    def begin(self, blocks):
        self.pool = Pool(PoolSpec("engine", 1, "model", SIZE, blocks))
        self.tensor = [[None] * SIZE for _ in range(blocks + 1)]
        self.sequences = {}
        self.last_id = 0

    @rule(data=st.data(), prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), max_size=2))
    def step(self, data, prompts):
        items, children, ended = self.plan(data.draw)
        asked = {}
        for prompt in prompts:
            self.last_id += 1
            salt = data.draw(st.sampled_from([b"", b"", b"salt"]), "salt")
            compute = data.draw(st.integers(1, len(prompt)), "compute")
            items["allocates"].append(Allocate(self.last_id, self.last_id, "request", salt, prompt, compute))
            asked[self.last_id] = Twin(self.last_id, salt, todo=list(prompt))
        result = self.pool.apply(Step(self.pool.last_step + 1, **items))
        assert {refusal.item for refusal in result.refusals} <= {StepItem.EXTEND, StepItem.ALLOCATE}
        self.sequences |= children
        for sequence in ended:
            del self.sequences[sequence]
        self.follow(result, asked)
        for source, destination in data.draw(st.permutations(result.copies), "copies"):
            self.tensor[destination] = list(self.tensor[source])
            event("copy")
        self.compute(data.draw)
        self.check()

    def plan(self, draw):
        """Draw what each sequence does; rooms are asked for in groups, one item each."""
        items = {"commits": [], "forks": [], "frees": [], "extends": [], "allocates": []}
        children, ended, rooms = {}, [], {}
        for number, sequence in sorted(self.sequences.items()):
            what = draw(st.sampled_from(PLANS), "plan")
            written = len(sequence.tokens)
            if what == "commit" and written // SIZE > sequence.committed:
                last = draw(st.integers(sequence.committed + 1, written // SIZE), "blocks")
                tokens = sequence.tokens[sequence.committed * SIZE : last * SIZE]
                items["commits"].append(Commit(number, sequence.committed, tokens))
                sequence.committed = last
            elif what == "fork" and written:
                self.last_id += 1
                length = draw(st.integers(max(1, written - 3), written), "length")
                items["forks"].append(Fork(number, self.last_id, length))
                children[self.last_id] = self.cut(sequence, length)
                writers = [self.last_id, number]
                if draw(st.booleans(), "replace"):
                    items["frees"].append(Free(number, FreeReason.PRUNED))
                    ended.append(writers.pop())
                if draw(st.booleans(), "go on"):
                    rooms.setdefault(sequence.group, []).extend((writer, length + 1) for writer in writers)
            elif what == "free":
                items["frees"].append(Free(number, FreeReason.FINISHED))
                ended.append(number)
            elif what == "extend":
                room = draw(st.integers(sequence.room, sequence.room + 3), "room")
                rooms.setdefault(sequence.group, []).append((number, room))
        items["extends"] = [Extend(group, draw(st.permutations(members))) for group, members in rooms.items()]
        return items, children, ended

    def cut(self, sequence, length):
        """What a fork does to the parent; the child is equal."""
        sequence.tokens = sequence.tokens[:length]
        sequence.todo = []
        sequence.committed = min(sequence.committed, length // SIZE)
        return Twin(sequence.group, sequence.salt, list(sequence.tokens), committed=sequence.committed)

    def follow(self, result, asked):
        for change in result.tables:
            if change.sequence in asked:
                sequence = self.sequences[change.sequence] = asked[change.sequence]
                sequence.tokens = sequence.todo[: change.cached_tokens]
                sequence.todo = sequence.todo[change.cached_tokens :]
                sequence.committed = change.cached_tokens // SIZE
            if change.sequence in self.sequences:
                sequence = self.sequences[change.sequence]
                sequence.table[change.first_index :] = change.block_ids
                sequence.room = change.room_tokens

    def compute(self, draw):
        """Write some of the tokens that there is room for."""
        for sequence in self.sequences.values():
            count = draw(st.integers(0, sequence.room - len(sequence.tokens)), "written")
            for _ in range(count):
                position = len(sequence.tokens)
                sequence.tokens.append(sequence.todo.pop(0) if sequence.todo else draw(st.integers(0, 1), "token"))
                block, slot = sequence.table[position // SIZE], position % SIZE
                self.tensor[block][slot] = (sequence.salt, *sequence.tokens)

    def check(self):
        assert self.pool.violations() == []
        for number, sequence in self.sequences.items():
            assert self.pool.sequences[number].table == sequence.table
            read = [
                self.tensor[sequence.table[position // SIZE]][position % SIZE]
                for position in range(len(sequence.tokens))
            ]
            assert read == [
                (sequence.salt, *sequence.tokens[: position + 1]) for position in range(len(sequence.tokens))
            ]
        for block in range(1, len(self.tensor)):
            key = self.pool.device.key(block)
            if key is not None:
                assert key == key_of(self.tensor[block])

    def teardown(self):
        self.pool.apply(
            Step(self.pool.last_step + 1, frees=[Free(number, FreeReason.FINISHED) for number in self.sequences])
        )
        assert self.pool.device.counts.held == 0


def key_of(slots):
    """Compute the key that a block of these contents should have; None if its slots do not belong together."""
    salt, *tokens = slots[-1]
    if slots != [(salt, *tokens[: len(tokens) - SIZE + slot + 1]) for slot in range(SIZE)]:
        return None
    key = root_key("model", salt)
    for start in range(0, len(tokens), SIZE):
        key = block_key(key, tokens[start : start + SIZE])
    return key


Executed.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=25,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestEverySequenceReadsItsOwnTokens = Executed.TestCase
