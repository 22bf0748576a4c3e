"""Random Steps and damage on a tiny pool, compared with a simple reference model."""

import copy
import pickle
from dataclasses import dataclass, field
from unittest import mock

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from blocks import (
    Allocate,
    Commit,
    Condemn,
    CondemnReason,
    Extend,
    Fork,
    Free,
    FreeReason,
    Length,
    Pin,
    Reset,
    Step,
    StepItem,
    StepRefusal,
    Unpin,
)
from kvmanager import Pool, PoolSpec, parts
from kvmanager.observe import audit, table_follower
from kvmanager.observe.audit import Audit
from kvmanager.tier import key_index, tier
from tests.kvmanager.random_runs import random_runs

SIZE, GROUPS = 2, 4
KINDS = [
    *("allocates", "allocates", "allocates", "commits", "commits", "commits", "extends", "extends", "forks"),
    *("frees", "swap_outs", "swap_ins", "swap_ins", "pins", "lengths", "condemns"),
]
ITEMS = [(kind, rare) for kind in KINDS for rare in [False] * 7 + [True]]
UNKNOWN = 99
COPIES = ("device_to_host", "host_to_device", "copies")


@dataclass
class TwinSequence:
    group: int
    root: tuple  # number of resets, and the salt
    prompt: list[int]
    table: list[int] = field(default_factory=list)
    room: int = 0
    computed: int = 0
    committed: int = 0
    swapped: bool = False


class Refused(Exception):
    pass


def demand(condition, reason=StepRefusal.INVALID):
    if not condition:
        raise Refused(reason)


class TwinTier:
    """Blocks of one tier: their release order, and the contents of keyed blocks."""

    def __init__(self, total):
        self.total = total
        self.order = list(range(1, total + 1))
        self.contents = {}  # of keyed blocks, in sealing order: root and all tokens up to the block's end
        # The same of unindexed held blocks: keyed before a reset, blamed, or copied from such a block; or None.
        self.lost = {}
        self.blamed = []  # in order; withheld once released

    def out(self):
        return [block for block in self.blamed if block not in self.order and block not in self.lost]

    def blame(self, block):
        self.blamed.append(block)
        content = self.contents.pop(block, None)
        if block in self.order:
            self.order.remove(block)
        else:
            self.lost.setdefault(block, content)

    def content(self, block):
        return self.contents.get(block) or self.lost.get(block)

    def find(self, content):
        return next((block for block, its in self.contents.items() if its == content), None)

    def keyless(self):
        return [block for block in self.order if block not in self.contents]

    def take(self):
        """Take the next block; return it and its former contents."""
        demand(self.order, StepRefusal.OUT_OF_BLOCKS)
        block = self.order.pop(0)
        return block, self.contents.pop(block, None)

    def put_back(self, block):
        self.lost.pop(block, None)
        if block not in self.blamed:
            self.order.insert(len(self.order) if block in self.contents else len(self.keyless()), block)

    def reset(self):
        self.lost |= {block: content for block, content in self.contents.items() if block not in self.order}
        self.contents = {}


class Twin:
    """A reference model of a pool. It counts by scanning, undoes by copying, and its keys are the tokens."""

    def __init__(self, blocks, host_blocks):
        self.sequences = {}
        self.pins = {}
        self.resets = 0
        self.device = TwinTier(blocks)
        self.host = TwinTier(host_blocks)
        self.late = []  # device blocks without a holder that a copy of this Step reads
        self.host_late = []  # host blocks released in this Step
        self.answer = {}

    def apply(self, step):
        lists = (*COPIES, "refusals", "sealed", "host_sealed", "tables", "evicted", "events")
        self.answer = {name: [] for name in lists} | {"granted": 0, "hit": 0, "asked": 0}
        for kind, verb, items in (
            (StepItem.CONDEMN, self.condemn, step.condemns),
            (StepItem.COMMIT, self.commit, step.commits),
            (StepItem.PIN, self.change_pins, step.pins),
            (StepItem.FORK, self.fork, step.forks),
            (StepItem.FREE, self.free, step.frees),
            (StepItem.SWAP_OUT, self.swap_out, step.swap_outs),
            (StepItem.SWAP_IN, self.swap_in, step.swap_ins),
            (StepItem.EXTEND, self.extend, step.extends),
            (StepItem.ALLOCATE, self.allocate, step.allocates),
            (StepItem.LENGTH, self.length, step.lengths),
        ):
            for position, item in enumerate(items):
                before = pickle.dumps(vars(self))
                try:
                    verb(item)
                except Refused as refused:
                    vars(self).update(pickle.loads(before))
                    self.answer["refusals"].append((kind, position, refused.args[0]))
                    self.note(f"refused {kind.name} {refused.args[0].name}")
        self.release(self.device, self.late)
        self.release(self.host, self.host_late)
        self.late, self.host_late = [], []

    def note(self, what):
        self.answer["events"].append(what)

    def holders(self, tier):
        """List the block of every table entry and pin of the tier."""
        tables = [sequence.table for sequence in self.sequences.values() if sequence.swapped == (tier is self.host)]
        pins = self.pins.values() if tier is self.device else ()
        return [block for blocks in (*tables, *pins) for block in blocks]

    def computed_tokens(self):
        """Count in each block the tokens of the holder with the most; pinned blocks are full."""
        filled = {block: SIZE for blocks in self.pins.values() for block in blocks}
        for sequence in self.sequences.values():
            for index, block in enumerate([] if sequence.swapped else sequence.table):
                own = sequence.computed - index * SIZE
                filled[block] = max(filled.get(block, 0), min(SIZE, max(0, own)))
        return sum(filled.values())

    def get(self, sequence, anywhere=False):
        demand(sequence in self.sequences, StepRefusal.UNKNOWN)
        demand(anywhere or not self.sequences[sequence].swapped)
        return self.sequences[sequence]

    def members(self, group):
        return {number: sequence for number, sequence in sorted(self.sequences.items()) if sequence.group == group}

    def add_table(self, number, first_index=0, cached=0):
        sequence = self.sequences[number]
        self.answer["tables"].append((number, first_index, sequence.table[first_index:], sequence.room, cached))

    def seal(self, tier, block, content):
        (tier.lost if block in tier.lost else tier.contents)[block] = content
        self.answer["sealed" if tier is self.device else "host_sealed"].append((block, content))

    def grant(self):
        block, content = self.device.take()
        self.answer["granted"] += 1
        if content:
            self.answer["evicted"].append((block, content))
            self.demote(block, content)
        return block

    def demote(self, block, content):
        if self.host.find(content):
            self.note("not demoted: the host has it")
        elif not self.host.keyless():
            self.note("not demoted: no host block is free")
        else:
            parked = self.host.keyless()[0]
            self.host.order.remove(parked)
            self.host.order.append(parked)
            self.seal(self.host, parked, content)
            self.answer["device_to_host"].append((block, parked))
            self.note("copy: demotion")

    def release(self, tier, blocks):
        """Release blocks whose entries were removed: each joins the order unless it has another holder."""
        for position, block in enumerate(blocks):
            if block not in blocks[position + 1 :] and block not in self.holders(tier):
                tier.put_back(block)

    def condemn(self, item):
        demand(item.kind == 0)
        tier = self.host if item.host else self.device
        demand(item.blocks and all(1 <= block <= tier.total for block in item.blocks))
        for block in dict.fromkeys(item.blocks):
            if block not in tier.blamed:
                state = "held" if block not in tier.order else "cached" if block in tier.contents else "free"
                self.note(f"condemned: {state}, {'host' if item.host else 'device'}")
                tier.blame(block)

    def commit(self, item):
        sequence = self.get(item.sequence)
        demand(item.token_ids and len(item.token_ids) % SIZE == 0)
        demand(item.first_index == sequence.committed)
        content = self.device.content(sequence.table[item.first_index - 1]) if item.first_index else sequence.root
        for start in range(0, len(item.token_ids), SIZE):
            content += tuple(item.token_ids[start : start + SIZE])
            demand((sequence.committed + 1) * SIZE <= sequence.room)
            block = sequence.table[sequence.committed]
            demand(self.device.content(block) in (None, content))
            if self.device.content(block) is None:
                self.seal(self.device, block, content)
            sequence.committed += 1

    def change_pins(self, item):
        if isinstance(item, Pin):
            self.pin(item)
        elif isinstance(item, Unpin):
            demand(item.pin_id in self.pins, StepRefusal.UNKNOWN)
            self.release(self.device, self.pins.pop(item.pin_id)[::-1])
            self.note("unpinned")
        else:
            self.resets += 1
            self.device.reset()
            self.host.reset()
            self.note(f"reset: {'some' if self.device.lost else 'none'} held")

    def pin(self, item):
        sequence = self.get(item.sequence)
        demand(item.pin_id)
        demand(item.pin_id not in self.pins, StepRefusal.ALREADY_EXISTS)
        demand(1 <= item.block_count <= sequence.committed)
        self.pins[item.pin_id] = sequence.table[: item.block_count]
        pinned = {block for blocks in self.pins.values() for block in blocks}
        for other in self.sequences.values():
            tables = {block for member in self.members(other.group).values() for block in member.table}
            needed = tables if other.swapped else tables - pinned
            demand(len(needed) + len(pinned) <= self.device.total - len(self.device.out()), StepRefusal.PIN_TOO_LARGE)
        self.note("pinned")

    def fork(self, item):
        parent = self.get(item.parent)
        demand(item.child not in self.sequences, StepRefusal.ALREADY_EXISTS)
        demand(1 <= item.length <= parent.room)
        dropped = []
        while (len(parent.table) - 1) * SIZE >= item.length:
            dropped.append(parent.table.pop())
        self.release(self.device, dropped)
        parent.room = item.length
        parent.computed = min(parent.computed, item.length)
        while parent.committed * SIZE > item.length:
            parent.committed -= 1
        self.sequences[item.child] = copy.deepcopy(parent)
        self.add_table(item.parent, len(parent.table))
        self.add_table(item.child)

    def free(self, item):
        sequence = self.get(item.sequence, anywhere=True)
        del self.sequences[item.sequence]
        if sequence.swapped:
            self.host_late += sequence.table[::-1]
            self.note("freed while swapped")
        else:
            self.release(self.device, sequence.table[::-1])

    def swap_out(self, group):
        copies, released = self.move(group, self.device, self.host, lambda: self.host.take()[0])
        self.answer["device_to_host"] += copies
        self.release(self.device, released)

    def swap_in(self, group):
        copies, released = self.move(group, self.host, self.device, self.grant)
        self.answer["host_to_device"] += copies
        self.host_late += released

    def move(self, group, source, target, take):
        """Rewrite the tables entry by entry; return the copies and the released entries."""
        members = self.members(group)
        demand(members, StepRefusal.UNKNOWN)
        demand(all(member.swapped == (source is self.host) for member in members.values()))
        tables = [member.table for member in members.values()]
        moved, copies = {}, []
        entries = [block for table in tables for block in table]
        for block in entries:
            if block in source.contents and target.find(source.contents[block]):
                moved[block] = target.find(source.contents[block])
                self.note("swap: shared with what was there")
        target.order = [block for block in target.order if block not in moved.values()]
        for block in entries:
            content = source.content(block)
            twin = target.find(content) if block in source.contents else None
            if twin and block not in moved:
                moved[block] = twin
                self.note("swap: shared with a twin")
            elif block not in moved:
                moved[block] = take()
                copies.append((block, moved[block]))
                self.note(f"copy: swap {'out' if target is self.host else 'in'}")
                if block in source.lost:
                    target.lost[moved[block]] = None
                    self.note("copy: swap of what nobody finds")
                if content:
                    self.seal(target, moved[block], content)
        for number, member in members.items():
            member.table = [moved[block] for block in member.table]
            member.swapped = target is self.host
            self.add_table(number)
        return copies, [block for table in tables for block in table[::-1]]

    def extend(self, item):
        members = [(number, self.get(number), tokens) for number, tokens in item.rooms]
        demand(all(member.group == item.group for _, member, _ in members))
        demand(len(dict(item.rooms)) == len(item.rooms))
        grown = [(number, member.room // SIZE) for number, member, tokens in members if tokens > member.room]
        for _, sequence, tokens in members:
            for position in range(sequence.room, tokens):
                self.make_writable(sequence.table, position // SIZE)
            if tokens > sequence.room:
                sequence.room = len(sequence.table) * SIZE
        for number, first_index in grown:
            self.add_table(number, first_index)

    def make_writable(self, table, index):
        if index == len(table):
            table.append(self.grant())
            return
        source = table[index]
        if self.holders(self.device).count(source) > 1 or self.device.content(source):
            table[index] = self.grant()
            self.answer["copies"].append((source, table[index]))
            self.note("copy: on write")
            if source in self.device.lost:
                self.device.lost[table[index]] = None
                self.note("copy: on write of what nobody finds")
            if source not in self.holders(self.device):
                self.late.append(source)

    def allocate(self, item):
        demand(item.sequence not in self.sequences, StepRefusal.ALREADY_EXISTS)
        demand(not self.members(item.group), StepRefusal.ALREADY_EXISTS)
        demand(item.token_ids and item.compute_tokens > 0 and item.spare_blocks >= 0)
        sequence = TwinSequence(item.group, (self.resets, item.salt), list(item.token_ids))
        hits = self.hits(sequence)
        for _, block, parked in hits:
            if block in self.device.order:
                self.device.order.remove(block)
            elif not block and parked in self.host.order:
                self.host.order.remove(parked)
                self.host.order.append(parked)
        here = sum(block is not None for _, block, _ in hits) + len(self.device.order)
        demand((here - item.spare_blocks) * SIZE >= len(item.token_ids), StepRefusal.OUT_OF_BLOCKS)
        for content, block, parked in hits:
            sequence.table.append(block or self.bring_back(content, parked))
        cached = len(hits) * SIZE
        while len(sequence.table) * SIZE < min(len(item.token_ids), cached + item.compute_tokens):
            sequence.table.append(self.grant())
        sequence.room = len(sequence.table) * SIZE
        sequence.computed = cached
        sequence.committed = len(hits)
        self.sequences[item.sequence] = sequence
        self.add_table(item.sequence, cached=cached)
        self.answer["hit"] += cached
        self.answer["asked"] += len(item.token_ids)

    def hits(self, sequence):
        """Return the prompt's hits: contents, device block and host block of each."""
        hits = []
        while (len(hits) + 1) * SIZE < len(sequence.prompt):
            content = (*sequence.root, *sequence.prompt[: (len(hits) + 1) * SIZE])
            block, parked = self.device.find(content), self.host.find(content)
            if not block and not parked:
                break
            hits.append((content, block, parked))
        return hits

    def bring_back(self, content, parked):
        block = self.grant()
        self.seal(self.device, block, content)
        self.answer["host_to_device"].append((parked, block))
        self.note("copy: host hit")
        return block

    def length(self, item):
        sequence = self.get(item.sequence, anywhere=True)
        demand(0 <= item.tokens <= sequence.room)
        sequence.computed = item.tokens


letters = st.integers(0, 1)


def holder_too_many(tier, block):
    tier._ref_counts[block] += 1


def holder_too_few(tier, block):
    tier._ref_counts[block] -= 1


def other_key(tier, block):
    tier.keys.by_block[block] = b"no block's"


# Each with its condition; an audit finds all of them by checking that block alone.
DAMAGES = {
    holder_too_many: lambda tier, block: True,
    holder_too_few: lambda tier, block: tier.ref_count(block) > 0,
    other_key: lambda tier, block: not tier.ref_count(block) and tier.key(block) is not None,
}


class RandomSteps(RuleBasedStateMachine):
    """Steps of several items go to the model and to two pools, slices of audits and damage to the first pool.

    The second pool is to the first what an engine's replica is to the KV manager's pool, and gets its Steps in slices.
    """

    @initialize(blocks=st.sampled_from([3, 3, 4, 4, 5, 6, 7, 8]), host_blocks=st.sampled_from([0, 1, 2, 3, 3, 4, 4]))
    def begin(self, blocks, host_blocks):
        self.pool, self.again = (Pool(PoolSpec("engine", 1, "model", SIZE, blocks, host_blocks)) for _ in range(2))
        self.twin = Twin(blocks, host_blocks)
        self.keys = {}  # of contents, from the pool's answers
        self.mirror = {}  # tables and rooms, from answers alone
        self.last_id = 0
        self.damaged = False
        self.audit = self.slices = None  # the running one
        self.short_slices = [
            mock.patch.object(module, "_SLICE", 2) for module in (audit, table_follower, tier, key_index)
        ]
        self.short_slices.append(mock.patch.object(parts, "PART", 1))
        for patch in self.short_slices:
            patch.start()

    def next_slice(self):
        """Run a slice, starting an audit if none runs; return its violations, or None at the end."""
        if not self.slices:
            self.audit = Audit(self.pool.state)
            self.slices = self.audit.slices()
        found = next(self.slices, None)
        if found is None:
            self.audit = self.slices = None
        return found

    @rule(slices=st.integers(1, 12))
    def audit_a_little(self, slices):
        for _ in range(slices):
            assert not self.next_slice()

    @precondition(lambda self: self.sound_blocks())
    @rule(data=st.data())
    def damage_until_an_audit_blames_it(self, data):
        """Damage a block and audit: no Step runs before the audit has found it."""
        host, block = data.draw(st.sampled_from(self.sound_blocks()), "block")
        tier = self.pool.host if host else self.pool.device
        possible = [damage for damage, fits in DAMAGES.items() if fits(tier, block)]
        damage = data.draw(st.sampled_from(possible), "damage")
        damage(tier, block)
        self.damaged = True
        while not (found := self.next_slice()):
            pass
        assert {(violation.block, violation.host) for violation in found} == {(block, host)}
        (self.twin.host if host else self.twin.device).blame(block)
        event(f"blamed: {damage.__name__}, {'host' if host else 'device'}")
        assert self.pool.violations() == []
        self.check_tiers()

    def sound_blocks(self):
        tiers = enumerate((self.twin.device, self.twin.host))
        return [
            (host > 0, block) for host, tier in tiers for block in range(1, tier.total + 1) if block not in tier.blamed
        ]

    @rule(data=st.data(), kinds=st.lists(st.sampled_from(ITEMS), min_size=2, max_size=8))
    def step(self, data, kinds):
        self.idle = [group for group in range(1, GROUPS + 1) if not self.twin.members(group)]
        items = {}
        for kind, rare in kinds:
            kind = kind if rare else self.worthwhile(kind)
            items.setdefault(kind, []).append(getattr(self, "draw_" + kind)(data.draw, rare))
        self.apply(**items)

    def worthwhile(self, kind):
        """Return this kind of item, or another one if it would always be refused."""
        if kind == "condemns" and self.scarce():
            kind = "lengths"
        if not self.twin.sequences or (kind == "allocates" and not self.idle):
            return "allocates" if self.idle else "extends"
        if kind == "swap_ins" and not any(sequence.swapped for sequence in self.twin.sequences.values()):
            return "swap_outs"
        return kind

    def scarce(self):
        """Whether so many blocks are blamed that few Steps would have blocks if more were."""
        return 3 * len(self.twin.device.blamed) >= self.twin.device.total

    def some_sequence(self, draw, rare, wanted=lambda sequence: True):
        sequences = sorted(self.twin.sequences.items())
        likely = [number for number, sequence in sequences if wanted(sequence) and not rare]
        return draw(st.sampled_from(likely or [*self.twin.sequences, self.last_id + 1, UNKNOWN]), "sequence")

    def some_group(self, draw, swapped, rare):
        groups = {sequence.group for sequence in self.twin.sequences.values() if rare or sequence.swapped == swapped}
        return draw(st.sampled_from(sorted(groups) + [UNKNOWN] * (rare or not groups)), "group")

    def room_of(self, sequence):
        return self.twin.sequences[sequence].room if sequence in self.twin.sequences else 0

    def draw_allocates(self, draw, rare):
        """Draw a prompt that continues cached contents, mostly those only in the host tier, or a new one."""
        device, host = (set(tier.contents.values()) for tier in (self.twin.device, self.twin.host))
        cached = [content for content in device | host if rare or content[0] == self.twin.resets]
        known = [content[1:] for content in sorted(cached) + sorted(host.intersection(cached) - device) * 4]
        salt, *prompt = draw(st.sampled_from([(b"",), (b"",), (b"salt",), *known]), "cached")
        prompt += draw(st.lists(letters, min_size=not rare, max_size=2 if prompt else 7), "own")
        self.last_id += 1
        return Allocate(
            draw(st.integers(1, GROUPS), "group") if rare else self.idle.pop(0),
            self.last_id,
            "request",
            draw(st.sampled_from([b"", b"salt"]), "salt") if rare else salt,
            prompt,
            draw(st.sampled_from([len(prompt), len(prompt), *range(not rare, 6)]), "compute"),
            draw(st.sampled_from([-1, 0, 1, 3]), "spare") if rare else 0,
        )

    def draw_condemns(self, draw, rare):
        """Condemn some blocks of a tier, some of them twice."""
        kind = draw(st.sampled_from([-1, 0, 0, 1]), "kind") if rare else 0
        return self.condemn_of(draw, rare, self.twin.device, self.twin.host, kind)

    def condemn_of(self, draw, rare, device, host, kind):
        sequence = self.some_sequence(draw, rare)
        on_host = draw(st.booleans(), "host") if rare or host.total else False
        blocks = st.integers(1 - rare, (host if on_host else device).total + rare)
        return Condemn(
            draw(st.sampled_from([0, sequence]), "found by"),
            draw(st.lists(blocks, min_size=not rare, max_size=2), "blocks"),
            draw(st.sampled_from(CondemnReason), "reason"),
            on_host,
            kind,
        )

    def draw_commits(self, draw, rare):
        """Commit as far as the room allows: tokens of the prompt, then random ones."""
        sequence = self.some_sequence(
            draw, rare, lambda one: one.room >= (one.committed + 1) * SIZE and not one.swapped
        )
        known = self.twin.sequences.get(sequence, TwinSequence(0, (), []))
        blocks = known.room // SIZE - known.committed
        blocks = draw(st.integers(0, blocks + 1), "blocks") if rare or blocks < 1 else blocks
        tokens = known.prompt[known.committed * SIZE :][: blocks * SIZE]
        wrong_count, wrong_index = (draw(st.integers(low, 1), "wrong") if rare else 0 for low in (0, -1))
        missing = blocks * SIZE - len(tokens) + wrong_count
        tokens += draw(st.lists(letters, min_size=missing, max_size=missing), "tokens")
        return Commit(sequence, known.committed + wrong_index, tokens)

    def draw_pins(self, draw, rare):
        what = draw(st.sampled_from(["pin"] * 6 + ["unpin"] * 3 + ["reset"]), "what")
        if what == "reset":
            return Reset()
        if what == "unpin":
            return Unpin(draw(st.sampled_from([*self.twin.pins, "unknown"]), "pin"))
        sequence = self.some_sequence(draw, rare, lambda one: one.committed and not one.swapped)
        committed = self.twin.sequences[sequence].committed if sequence in self.twin.sequences else 0
        count = draw(st.integers(0, committed + 1) if rare else st.integers(1, max(1, committed)), "count")
        return Pin(draw(st.sampled_from(["", "a", "b"] if rare else ["a", "b", "c"]), "pin"), sequence, count)

    def draw_forks(self, draw, rare):
        parent = self.some_sequence(draw, rare, lambda one: not one.swapped)
        room = self.room_of(parent)
        length = draw(st.integers(0, room + 1) if rare else st.integers(max(1, room - 3), max(1, room)), "length")
        self.last_id += 1
        return Fork(parent, draw(st.sampled_from([parent, self.last_id])) if rare else self.last_id, length)

    def draw_frees(self, draw, rare):
        return Free(self.some_sequence(draw, rare), draw(st.sampled_from(FreeReason), "reason"))

    def draw_swap_outs(self, draw, rare):
        return self.some_group(draw, False, rare)

    def draw_swap_ins(self, draw, rare):
        return self.some_group(draw, True, rare)

    def draw_extends(self, draw, rare):
        group = self.some_group(draw, False, rare)
        asked = draw(st.permutations([*self.twin.members(group)]), "members")
        asked += [self.some_sequence(draw, rare)] if rare else []
        return Extend(group, [(number, self.room_of(number) + draw(st.integers(-1, 4), "more")) for number in asked])

    def draw_lengths(self, draw, rare):
        sequence = self.some_sequence(draw, rare)
        return Length(sequence, draw(st.integers(-1, self.room_of(sequence) + 1), "tokens"))

    def apply(self, **items):
        step = Step(self.pool.last_step + 1, **items)
        applied = self.pool.apply(step)
        if self.audit:
            self.audit.on_step(applied)
        self.twin.apply(step)
        assert self.pool.violations() == []
        self.check_answer(applied)
        self.check_state(applied)
        for block in applied.result.withheld_blocks:
            self.again.withhold([block], [])
        for block in applied.result.host_withheld_blocks:
            self.again.withhold([], [block])
        assert self.in_slices(step) == applied
        for what in self.twin.answer["events"]:
            event(what)

    def in_slices(self, step):
        """Apply a Step to the other pool, which is valid between any two items."""
        work = self.again.applying(step, budget=1)
        while True:
            try:
                next(work)
            except StopIteration as end:
                return end.value
            assert self.again.violations() == []

    def check_answer(self, applied):
        answer, result = self.twin.answer, applied.result
        assert [(refusal.item, refusal.position, refusal.reason) for refusal in result.refusals] == answer["refusals"]
        for name in (*COPIES, "tables"):
            assert list(getattr(result, name)) == answer[name], name
        for name in COPIES:
            destinations = [destination for _, destination in getattr(result, name)]
            assert len(set(destinations)) == len(destinations), name
        assert not {source for source, _ in result.copies} & {destination for _, destination in result.copies}
        for name in ("sealed", "host_sealed", "evicted"):
            for (block, key), (twins_block, content) in zip(getattr(applied, name), answer[name], strict=True):
                assert block == twins_block, name
                assert self.keys.setdefault(content, key) == key, name
        assert len(set(self.keys.values())) == len(self.keys)
        assert (applied.granted_blocks, applied.evicted_blocks) == (answer["granted"], len(answer["evicted"]))
        assert (applied.hit_tokens, applied.query_tokens) == (answer["hit"], answer["asked"])
        assert [eviction for *_, evicted, _ in applied.effects for eviction in evicted] == applied.evicted
        self.follow(result.tables)

    def follow(self, tables):
        for table in tables:
            old, _ = self.mirror.get(table.sequence, ([], 0))
            self.mirror[table.sequence] = ([*old[: table.first_index], *table.block_ids], table.room_tokens)
        for sequence in self.mirror.keys() - self.twin.sequences.keys():
            del self.mirror[sequence]
        twins = self.twin.sequences.items()
        assert self.mirror == {number: (sequence.table, sequence.room) for number, sequence in twins}

    def check_state(self, applied):
        pool, twin = self.pool, self.twin
        assert {
            number: (one.group, one.table, one.room_tokens, one.computed_tokens, one.committed_blocks, one.swapped)
            for number, one in pool.sequences.items()
        } == {
            number: (one.group, one.table, one.room, one.computed, one.committed, one.swapped)
            for number, one in twin.sequences.items()
        }
        groups = {one.group for one in twin.sequences.values()}
        assert {group: sorted(found) for group, found in pool.groups.items()} == {
            group: [*twin.members(group)] for group in groups
        }
        assert pool.state.pins == twin.pins
        assert pool.computed_tokens() == twin.computed_tokens()
        assert (applied.device, applied.host) == (pool.device.counts, pool.host.counts)
        self.check_tiers()

    def check_tiers(self):
        self.check_tier(self.pool.device, self.twin.device)
        self.check_tier(self.pool.host, self.twin.host)

    def check_tier(self, tier, twin):
        blocks = range(1, twin.total + 1)
        holders = self.twin.holders(twin)
        counts = [holders.count(block) for block in blocks]
        assert [tier.ref_count(block) for block in blocks] == counts
        assert tier.eviction_order() == twin.order
        assert tier.evictions == []
        free, held = len(twin.keyless()), sum(count > 0 for count in counts)
        assert tier.counts == (free, len(twin.order) - free, held, len(twin.out()))
        assert tier.marks.withheld() == sorted(twin.out())
        assert tier.marks.withheld_on_release() == sorted(set(twin.blamed) - set(twin.out()))
        assert tier.shared == sum(count > 1 for count in counts)
        assert tier.saved == sum(counts) - held
        contents = [twin.content(block) for block in blocks]
        assert [tier.key(block) for block in blocks] == [content and self.keys[content] for content in contents]
        for content, key in self.keys.items():
            assert tier.keys.find(key) == twin.find(content)

    def teardown(self):
        """After all sequences were freed, only pinned blocks are held."""
        for patch in self.short_slices:
            patch.stop()
        self.apply(frees=[Free(sequence, FreeReason.CANCELLED) for sequence in self.twin.sequences])
        assert (self.pool.sequences, self.pool.groups) == ({}, {})
        assert self.pool.host.counts.held == 0
        assert self.pool.device.counts.held == len({block for blocks in self.twin.pins.values() for block in blocks})
        self.apply(pins=[Unpin(pin_id) for pin_id in self.twin.pins])
        assert self.pool.device.counts.held == 0


RandomSteps.TestCase.settings = random_runs(examples=350, steps=9)
TestRandomSteps = RandomSteps.TestCase
