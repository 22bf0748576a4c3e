"""Random Steps in a tiny universe, beside a twin that is too dumb to be wrong."""

import copy
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
    Length,
    Pool,
    PoolSpec,
    Step,
    StepItem,
    StepRefusal,
)

SIZE, GROUPS = 2, 4
KINDS = ["allocates", "allocates", "commits", "commits", "extends", "extends", "forks", "forks", "frees", "lengths"]
UNKNOWN = 99


@dataclass
class TwinSequence:
    group: int
    salt: bytes
    prompt: list[int]
    table: list[int] = field(default_factory=list)
    room: int = 0
    computed: int = 0
    committed: int = 0


class Refused(Exception):
    pass


def demand(condition, reason=StepRefusal.INVALID):
    if not condition:
        raise Refused(reason)


class Twin:
    """What a pool should do, token by token. It counts by looking, undoes by copying, and its keys are the tokens."""

    def __init__(self, blocks):
        self.sequences = {}
        self.order = list(range(1, blocks + 1))  # in which blocks are handed out
        self.contents = {}  # of keyed blocks, in sealing order: salt and all tokens up to the block's end
        self.unread = []  # blocks without a holder that a copy of this Step reads
        self.answer = {}

    def apply(self, step):
        self.answer = {"refusals": [], "sealed": [], "copies": [], "cached": [], "granted": 0, "evicted": 0, "asked": 0}
        for kind, verb, items in (
            (StepItem.COMMIT, self.commit, step.commits),
            (StepItem.FORK, self.fork, step.forks),
            (StepItem.FREE, self.free, step.frees),
            (StepItem.EXTEND, self.extend, step.extends),
            (StepItem.ALLOCATE, self.allocate, step.allocates),
            (StepItem.LENGTH, self.length, step.lengths),
        ):
            for position, item in enumerate(items):
                before = copy.deepcopy(vars(self))
                try:
                    verb(item)
                except Refused as refused:
                    vars(self).update(before)
                    self.answer["refusals"].append((kind, position, refused.args[0]))
        while self.unread:
            self.drop(self.unread.pop(0))

    def count(self, block):
        return sum(sequence.table.count(block) for sequence in self.sequences.values())

    def computed_tokens(self):
        """In each block, those of the holder that has most of it."""
        filled = {}
        for sequence in self.sequences.values():
            for index, block in enumerate(sequence.table):
                own = sequence.computed - index * SIZE
                filled[block] = max(filled.get(block, 0), min(SIZE, max(0, own)))
        return sum(filled.values())

    def find(self, content):
        return next((block for block, its in self.contents.items() if its == content), None)

    def get(self, sequence):
        demand(sequence in self.sequences, StepRefusal.UNKNOWN)
        return self.sequences[sequence]

    def grant(self):
        demand(self.order, StepRefusal.OUT_OF_BLOCKS)
        block = self.order.pop(0)
        self.answer["granted"] += 1
        self.answer["evicted"] += self.contents.pop(block, None) is not None
        return block

    def drop(self, block):
        """One table entry fewer: the last one puts the block into the order."""
        if not self.count(block):
            keyless = [other for other in self.order if other not in self.contents]
            self.order.insert(len(self.order) if block in self.contents else len(keyless), block)

    def commit(self, item):
        sequence = self.get(item.sequence)
        demand(item.token_ids and len(item.token_ids) % SIZE == 0)
        demand(item.first_index == sequence.committed)
        for start in range(0, len(item.token_ids), SIZE):
            tokens = tuple(item.token_ids[start : start + SIZE])
            demand((sequence.committed + 1) * SIZE <= sequence.room)
            before = self.contents[sequence.table[sequence.committed - 1]] if sequence.committed else (sequence.salt,)
            block = sequence.table[sequence.committed]
            demand(self.contents.get(block, before + tokens) == before + tokens)
            if block not in self.contents:
                self.contents[block] = before + tokens
                self.answer["sealed"].append(block)
            sequence.committed += 1

    def fork(self, item):
        parent = self.get(item.parent)
        demand(item.child not in self.sequences, StepRefusal.ALREADY_EXISTS)
        demand(1 <= item.length <= parent.room)
        while (len(parent.table) - 1) * SIZE >= item.length:
            self.drop(parent.table.pop())
        parent.room = item.length
        parent.computed = min(parent.computed, item.length)
        while parent.committed * SIZE > item.length:
            parent.committed -= 1
        self.sequences[item.child] = copy.deepcopy(parent)

    def free(self, item):
        sequence = self.get(item.sequence)
        while sequence.table:
            self.drop(sequence.table.pop())
        del self.sequences[item.sequence]

    def extend(self, item):
        members = [(self.get(sequence), tokens) for sequence, tokens in item.rooms]
        demand(all(member.group == item.group for member, _ in members))
        demand(len(dict(item.rooms)) == len(item.rooms))
        for sequence, tokens in members:
            for position in range(sequence.room, tokens):
                self.make_writable(sequence.table, position // SIZE)
            sequence.room = max(sequence.room, len(sequence.table) * SIZE if tokens > sequence.room else 0)

    def make_writable(self, table, index):
        if index == len(table):
            table.append(self.grant())
            return
        source = table[index]
        if self.count(source) > 1 or source in self.contents:
            table[index] = self.grant()
            self.answer["copies"].append((source, table[index]))
            if not self.count(source):
                self.unread.append(source)

    def allocate(self, item):
        demand(item.sequence not in self.sequences, StepRefusal.ALREADY_EXISTS)
        demand(all(item.group != sequence.group for sequence in self.sequences.values()), StepRefusal.ALREADY_EXISTS)
        demand(item.token_ids and item.compute_tokens > 0)
        sequence = TwinSequence(item.group, item.salt, list(item.token_ids))
        hits = []
        while (len(hits) + 1) * SIZE < len(item.token_ids):
            hit = self.find((item.salt, *item.token_ids[: (len(hits) + 1) * SIZE]))
            if hit is None:
                break
            hits.append(hit)
        self.order = [block for block in self.order if block not in hits]
        cached = len(hits) * SIZE
        demand(
            (len(hits) + len(self.order) - item.spare_blocks) * SIZE >= len(item.token_ids), StepRefusal.OUT_OF_BLOCKS
        )
        sequence.table = hits
        while len(sequence.table) * SIZE < min(len(item.token_ids), cached + item.compute_tokens):
            sequence.table.append(self.grant())
        sequence.room = len(sequence.table) * SIZE
        sequence.computed = cached
        sequence.committed = cached // SIZE
        self.sequences[item.sequence] = sequence
        self.answer["cached"].append((item.sequence, cached))
        self.answer["asked"] += len(item.token_ids)

    def length(self, item):
        sequence = self.get(item.sequence)
        demand(0 <= item.tokens <= sequence.room)
        sequence.computed = item.tokens


letters = st.integers(0, 1)


class RandomSteps(RuleBasedStateMachine):
    """Each rule is a Step of several items; it goes to two pools and to the twin."""

    @initialize(blocks=st.integers(3, 8))
    def begin(self, blocks):
        self.pool, self.again = (Pool(PoolSpec("engine", 1, "model", SIZE, blocks)) for _ in range(2))
        self.twin = Twin(blocks)
        self.blocks = range(1, blocks + 1)
        self.mirror = {}  # tables and rooms as an engine knows them: from answers alone
        self.last_id = 0

    @rule(data=st.data(), kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6))
    def step(self, data, kinds):
        items = {}
        for kind in kinds:
            rare = data.draw(st.sampled_from([False] * 7 + [True]), "rare")
            items.setdefault(kind, []).append(getattr(self, "draw_" + kind)(data.draw, rare))
        self.apply(**items)

    def some_sequence(self, draw):
        return draw(st.sampled_from([*sorted(self.twin.sequences) * 6, self.last_id + 1, UNKNOWN]), "sequence")

    def room_of(self, sequence):
        return self.twin.sequences[sequence].room if sequence in self.twin.sequences else 0

    def members(self, group):
        return [number for number, sequence in sorted(self.twin.sequences.items()) if sequence.group == group]

    def draw_allocates(self, draw, rare):
        idle = [group for group in range(1, GROUPS + 1) if rare or not self.members(group)]
        prompts = [(), *sorted({content[1:] for content in self.twin.contents.values()})]
        prompt = [*draw(st.sampled_from(prompts), "cached"), *draw(st.lists(letters, min_size=not rare, max_size=7))]
        self.last_id += 1
        return Allocate(
            draw(st.sampled_from(idle or [UNKNOWN]), "group"),
            self.last_id,
            "request",
            draw(st.sampled_from([b"", b"", b"", b"salt"]), "salt"),
            prompt,
            draw(st.sampled_from([len(prompt), len(prompt), *range(not rare, 6)]), "compute"),
            draw(st.sampled_from([0, 1, 3]), "spare") if rare else 0,
        )

    def draw_commits(self, draw, rare):
        """Commit all that there is room for; the tokens are those of the prompt, then any."""
        sequence = self.some_sequence(draw)
        known = self.twin.sequences.get(sequence, TwinSequence(0, b"", []))
        blocks = known.room // SIZE - known.committed
        blocks = draw(st.integers(0, blocks + 1), "blocks") if rare or blocks < 1 else blocks
        tokens = known.prompt[known.committed * SIZE :][: blocks * SIZE]
        wrong_count, wrong_index = (draw(st.integers(low, 1), "wrong") if rare else 0 for low in (0, -1))
        missing = blocks * SIZE - len(tokens) + wrong_count
        tokens += draw(st.lists(letters, min_size=missing, max_size=missing), "tokens")
        return Commit(sequence, known.committed + wrong_index, tokens)

    def draw_forks(self, draw, rare):
        parent = self.some_sequence(draw)
        room = self.room_of(parent)
        length = draw(st.integers(0, room + 1) if rare else st.integers(max(1, room - 3), max(1, room)), "length")
        self.last_id += 1
        return Fork(parent, draw(st.sampled_from([parent, self.last_id])) if rare else self.last_id, length)

    def draw_frees(self, draw, _rare):
        return Free(self.some_sequence(draw), draw(st.sampled_from(FreeReason), "reason"))

    def draw_extends(self, draw, rare):
        groups = sorted({sequence.group for sequence in self.twin.sequences.values()})
        group = draw(st.sampled_from(groups or [UNKNOWN]), "group")
        asked = draw(st.permutations(self.members(group)), "members")
        asked += [self.some_sequence(draw)] if rare else []
        return Extend(group, [(number, self.room_of(number) + draw(st.integers(-1, 4), "more")) for number in asked])

    def draw_lengths(self, draw, _rare):
        sequence = self.some_sequence(draw)
        return Length(sequence, draw(st.integers(-1, self.room_of(sequence) + 1), "tokens"))

    def apply(self, **items):
        step = Step(self.pool.last_step + 1, **items)
        result = self.pool.apply(step)
        self.twin.apply(step)
        assert self.pool.violations() == []
        self.check_answer(result)
        self.check_state(result)
        assert self.again.apply(step) == result
        for kind, _, reason in self.twin.answer["refusals"]:
            event(f"refused {kind.name} {reason.name}")
        for what in ("copies", "evicted"):
            if self.twin.answer[what]:
                event(what)

    def check_answer(self, result):
        answer = self.twin.answer
        assert [(refusal.item, refusal.position, refusal.reason) for refusal in result.refusals] == answer["refusals"]
        assert result.copies == answer["copies"]
        assert not {source for source, _ in result.copies} & {destination for _, destination in result.copies}
        assert [seal.block for seal in result.sealed] == answer["sealed"]
        assert (result.granted_blocks, result.evicted_blocks) == (answer["granted"], answer["evicted"])
        hits = dict(answer["cached"])
        assert {table.sequence: table.cached_tokens for table in result.tables if table.sequence in hits} == hits
        assert (result.hit_tokens, result.query_tokens) == (sum(hits.values()), answer["asked"])
        for table in result.tables:
            old, _ = self.mirror.get(table.sequence, ([], 0))
            self.mirror[table.sequence] = ([*old[: table.first_index], *table.block_ids], table.room_tokens)
        for sequence in self.mirror.keys() - self.twin.sequences.keys():
            del self.mirror[sequence]

    def check_state(self, result):
        device, twin = self.pool.device, self.twin
        counts = [twin.count(block) for block in self.blocks]
        assert [device.count(block) for block in self.blocks] == counts
        assert device.eviction_order() == twin.order
        cached = sum(block in twin.contents for block in twin.order)
        held = sum(count > 0 for count in counts)
        assert result.device == device.counts == (len(twin.order) - cached, cached, held, 0)
        assert device.shared == sum(count > 1 for count in counts)
        assert device.saved == sum(counts) - held
        assert self.pool.computed_tokens() == twin.computed_tokens()
        assert self.mirror == {number: (sequence.table, sequence.room) for number, sequence in twin.sequences.items()}
        assert {
            number: (sequence.group, sequence.table, sequence.room, sequence.computed, sequence.committed)
            for number, sequence in self.pool.sequences.items()
        } == {
            number: (sequence.group, sequence.table, sequence.room, sequence.computed, sequence.committed)
            for number, sequence in twin.sequences.items()
        }
        self.check_keys()

    def check_keys(self):
        device, contents = self.pool.device, self.twin.contents
        keys = {block: device.key(block) for block in self.blocks if device.key(block) is not None}
        assert keys.keys() == contents.keys()
        pairs = {(key, contents[block]) for block, key in keys.items()}
        assert len(set(keys.values())) == len(set(contents.values())) == len(pairs)
        for block, key in keys.items():
            assert device.find(key) == self.twin.find(contents[block])

    def teardown(self):
        """However it went, nothing is held after all have ended."""
        self.apply(frees=[Free(sequence, FreeReason.CANCELLED) for sequence in self.twin.sequences])
        assert self.pool.device.counts.held == 0
        assert (self.pool.sequences, self.pool.groups) == ({}, {})


RandomSteps.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=20,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestRandomSteps = RandomSteps.TestCase
