"""Random Steps on a tiny pool with window kinds, compared with a model that searches by trying every boundary."""

import copy
import pickle
from array import array
from dataclasses import dataclass, field
from unittest import mock

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from blocks import Pin, Step, StepItem, StepRefusal, Trim, Unpin, WindowKind
from kvmanager import Pool, PoolSpec, adopt, parts
from kvmanager.lookup import lookup_prefix
from kvmanager.observe import audit, table_follower
from kvmanager.report import report_of
from kvmanager.tier import key_index, tier
from tests.kvmanager.random_runs import random_runs
from tests.kvmanager.test_random_steps import COPIES, DAMAGES, SIZE, RandomSteps, Refused, TwinTier, demand
from tests.kvmanager.tiny_pools import end_of

WINDOWS = [
    ((3, False),),
    ((4, False),),
    ((1, False),),
    ((4, True),),
    ((6, True),),
    ((3, False), (6, True)),
    ((2, False), (5, False)),
]
LISTS = (*COPIES, "sealed", "host_sealed", "tables", "evicted")


@dataclass
class KindsSequence:
    """A sequence with a table for each kind: blocks by logical block. `contents` are those of committed blocks."""

    group: int
    root: tuple
    prompt: list[int]
    tables: list[dict[int, int]]
    room: int = 0
    computed: int = 0
    contents: list = field(default_factory=list)
    swapped: bool = False
    position: int = 0
    boundaries: set = field(default_factory=set)

    @property
    def committed(self):
        return len(self.contents)

    def table(self, kind):
        return [self.tables[kind][index] for index in sorted(self.tables[kind])]


class TwinKind:
    """The tiers and pins of a kind. Without `tokens`, all are kept."""

    def __init__(self, number, blocks, host_blocks, tokens=0, chunked=False):
        self.number, self.tokens, self.chunked = number, tokens, chunked
        self.device, self.host = TwinTier(blocks), TwinTier(host_blocks)
        self.pins = {}
        self.late, self.host_late = [], []
        self.answer = {}

    def sees(self, position, token):
        """Whether the query at a position sees a token."""
        if not self.tokens:
            return token <= position
        if self.chunked:
            return token <= position and token // self.tokens == position // self.tokens
        return position - self.tokens < token <= position

    def needs(self, position, logical):
        """Whether a query at a position sees a token of a logical block before it."""
        tokens = range(logical * SIZE, (logical + 1) * SIZE)
        return any(self.sees(position, token) for token in tokens if token < position)

    def has_left(self, position, logical):
        """Whether neither the query at a position nor a later one sees the block."""
        return not self.sees(position, logical * SIZE + SIZE - 1) and (logical + 1) * SIZE <= position


class KindsTwin:
    """A reference model of a pool with window kinds. It undoes by copying."""

    def __init__(self, kinds, retention):
        self.sequences = {}
        self.kinds = kinds
        self.retention = retention
        self.resets = 0
        self.answer = {}

    @property
    def device(self):
        return self.kinds[0].device

    @property
    def host(self):
        return self.kinds[0].host

    @property
    def pins(self):
        return self.kinds[0].pins

    def apply(self, step):
        self.answer = {"refusals": [], "events": [], "hit": 0, "asked": 0}
        for kind in self.kinds:
            kind.answer = {name: [] for name in LISTS}
        for item_kind, verb, items in (
            (StepItem.CONDEMN, self.condemn, step.condemns),
            (StepItem.COMMIT, self.commit, step.commits),
            (StepItem.TRIM, self.trim, step.trims),
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
                    self.answer["refusals"].append((item_kind, position, refused.args[0]))
                    self.note(f"refused {item_kind.name} {refused.args[0].name}")
        for kind in self.kinds:
            self.release(kind, kind.device, kind.late)
            self.release(kind, kind.host, kind.host_late)
            kind.late, kind.host_late = [], []

    def note(self, what):
        self.answer["events"].append(what)

    def holders(self, kind, tier):
        """List the block of every table entry and pin of a tier."""
        on_host = tier is kind.host
        tables = [one.table(kind.number) for one in self.sequences.values() if one.swapped == on_host]
        return [block for blocks in (*tables, *(() if on_host else kind.pins.values())) for block in blocks]

    def get(self, sequence, anywhere=False):
        demand(sequence in self.sequences, StepRefusal.UNKNOWN)
        demand(anywhere or not self.sequences[sequence].swapped)
        return self.sequences[sequence]

    def members(self, group):
        return {number: sequence for number, sequence in sorted(self.sequences.items()) if sequence.group == group}

    def add_table(self, number, first_index=None, cached=0):
        sequence = self.sequences[number]
        for kind in self.kinds:
            table = sequence.tables[kind.number]
            first = self.first(sequence, kind) if first_index is None else first_index
            blocks = [table[index] for index in sorted(table) if index >= first]
            kind.answer["tables"].append((number, first, blocks, sequence.room, cached))

    def first(self, sequence, kind):
        """Return the first logical block that has not left the window."""
        logical = 0
        while kind.tokens and kind.has_left(sequence.position, logical):
            logical += 1
        return logical

    def seal(self, kind, tier, block, content):
        (tier.lost if block in tier.lost else tier.contents)[block] = content
        kind.answer["sealed" if tier is kind.device else "host_sealed"].append((block, content))

    def grant(self, kind):
        block, content = kind.device.take()
        if content:
            kind.answer["evicted"].append((block, content))
            if not kind.host.find(content) and kind.host.keyless():
                parked = kind.host.keyless()[0]
                kind.host.order.remove(parked)
                kind.host.order.append(parked)
                self.seal(kind, kind.host, parked, content)
                kind.answer["device_to_host"].append((block, parked))
        return block

    def release(self, kind, tier, blocks):
        for position, block in enumerate(blocks):
            if block not in blocks[position + 1 :] and block not in self.holders(kind, tier):
                tier.put_back(block)

    def condemn(self, item):
        demand(0 <= item.kind < len(self.kinds))
        kind = self.kinds[item.kind]
        tier = kind.host if item.host else kind.device
        demand(item.blocks and all(1 <= block <= tier.total for block in item.blocks))
        for block in dict.fromkeys(item.blocks):
            if block not in tier.blamed:
                tier.blame(block)
                self.note(f"condemned in {'a window kind' if kind.tokens else 'kind 0'}")

    def commit(self, item):
        sequence = self.get(item.sequence)
        demand(item.token_ids and len(item.token_ids) % SIZE == 0)
        demand(item.first_index == sequence.committed)
        content = sequence.contents[-1] if sequence.contents else sequence.root
        for start in range(0, len(item.token_ids), SIZE):
            content += tuple(item.token_ids[start : start + SIZE])
            logical = sequence.committed
            demand((logical + 1) * SIZE <= sequence.room)
            demand(self.device.content(sequence.tables[0][logical]) in (None, content))
            for kind in self.kinds:
                block = sequence.tables[kind.number].get(logical)
                if block and kind.device.content(block) is None:
                    self.seal(kind, kind.device, block, content)
            sequence.contents.append(content)

    def trim(self, item):
        sequence = self.get(item.sequence)
        demand(sequence.position <= item.position <= sequence.room)
        sequence.position = item.position
        for kind in self.kinds[1:]:
            left = [index for index in sorted(sequence.tables[kind.number]) if kind.has_left(item.position, index)]
            self.forget(kind, sequence, left, sequence.boundaries)
            blocks = [sequence.tables[kind.number].pop(index) for index in left]
            self.release(kind, kind.device, blocks)
            if blocks:
                self.note("trimmed")

    def forget(self, kind, sequence, indices, boundaries):
        """Remove the keys of blocks that no boundary needs and that nobody else holds."""
        for index in indices:
            block = sequence.tables[kind.number][index]
            behind = range(index + 1, index + 100)
            regular = {count for count in behind if self.retention and count * SIZE % self.retention == 0}
            needed = any(kind.needs(count * SIZE, index) for count in boundaries | regular if count > index)
            alone = self.holders(kind, kind.device).count(block) == 1
            if not needed and alone and block in kind.device.contents:
                del kind.device.contents[block]
                self.note("a key is of no use")
            elif needed and block in kind.device.contents:
                self.note("a key is retained")

    def change_pins(self, item):
        if isinstance(item, Pin):
            self.pin(item)
        elif isinstance(item, Unpin):
            demand(item.pin_id in self.pins, StepRefusal.UNKNOWN)
            for kind in self.kinds:
                self.release(kind, kind.device, kind.pins.pop(item.pin_id)[::-1])
        else:
            self.resets += 1
            for kind in self.kinds:
                kind.device.reset()
                kind.host.reset()

    def pin(self, item):
        sequence = self.get(item.sequence)
        demand(item.pin_id)
        demand(item.pin_id not in self.pins, StepRefusal.ALREADY_EXISTS)
        demand(1 <= item.block_count <= sequence.committed)
        for kind in self.kinds:
            needed = [index for index in range(item.block_count) if kind.needs(item.block_count * SIZE, index)]
            table = sequence.tables[kind.number]
            demand(all(index in table for index in needed))
            pinned = {block for blocks in kind.pins.values() for block in blocks} | {table[index] for index in needed}
            for other in self.sequences.values():
                tables = {block for member in self.members(other.group).values() for block in member.table(kind.number)}
                own = tables if other.swapped else tables - pinned
                demand(len(own) + len(pinned) <= kind.device.total - len(kind.device.out()), StepRefusal.PIN_TOO_LARGE)
        for kind in self.kinds:
            table = sequence.tables[kind.number]
            needed = [index for index in range(item.block_count) if kind.needs(item.block_count * SIZE, index)]
            kind.pins[item.pin_id] = [table[index] for index in needed]
        self.note("pinned")

    def fork(self, item):
        parent = self.get(item.parent)
        demand(item.child not in self.sequences, StepRefusal.ALREADY_EXISTS)
        demand(max(1, parent.position) <= item.length <= parent.room)
        for kind in self.kinds:
            table = parent.tables[kind.number]
            beyond = [index for index in sorted(table, reverse=True) if index * SIZE >= item.length]
            self.release(kind, kind.device, [table.pop(index) for index in beyond])
        parent.room = item.length
        parent.computed = min(parent.computed, item.length)
        del parent.contents[item.length // SIZE :]
        self.sequences[item.child] = copy.deepcopy(parent)
        self.add_table(item.parent, -(-item.length // SIZE))
        self.add_table(item.child)

    def free(self, item):
        sequence = self.get(item.sequence, anywhere=True)
        for kind in self.kinds[1:]:
            if not sequence.swapped:
                boundaries = sequence.boundaries | {sequence.committed}
                self.forget(kind, sequence, sorted(sequence.tables[kind.number]), boundaries)
        del self.sequences[item.sequence]
        for kind in self.kinds:
            blocks = sequence.table(kind.number)[::-1]
            if sequence.swapped:
                kind.host_late += blocks
            else:
                self.release(kind, kind.device, blocks)

    def swap_out(self, group):
        self.move(group, to_host=True)

    def swap_in(self, group):
        self.move(group, to_host=False)

    def move(self, group, to_host):
        members = self.members(group)
        demand(members, StepRefusal.UNKNOWN)
        demand(all(member.swapped != to_host for member in members.values()))
        released = [self.move_kind(kind, members, to_host) for kind in self.kinds]
        for member in members.values():
            member.swapped = to_host
        for number in members:
            self.add_table(number)
        for kind, blocks in zip(self.kinds, released, strict=True):
            if to_host:
                self.release(kind, kind.device, blocks)
            else:
                kind.host_late += blocks

    def move_kind(self, kind, members, to_host):
        """Rewrite the tables of a kind entry by entry; return the released entries."""
        source, target = (kind.device, kind.host) if to_host else (kind.host, kind.device)
        tables = [member.table(kind.number) for member in members.values()]
        moved = {}
        entries = [block for table in tables for block in table]
        for block in entries:
            if block in source.contents and target.find(source.contents[block]):
                moved[block] = target.find(source.contents[block])
        target.order = [block for block in target.order if block not in moved.values()]
        for block in entries:
            content = source.content(block)
            twin = target.find(content) if block in source.contents else None
            if twin and block not in moved:
                moved[block] = twin
            elif block not in moved:
                moved[block] = target.take()[0] if to_host else self.grant(kind)
                kind.answer["device_to_host" if to_host else "host_to_device"].append((block, moved[block]))
                if block in source.lost:
                    target.lost[moved[block]] = None
                if content:
                    self.seal(kind, target, moved[block], content)
        for member in members.values():
            table = member.tables[kind.number]
            member.tables[kind.number] = {index: moved[block] for index, block in table.items()}
        return [block for table in tables for block in table[::-1]]

    def extend(self, item):
        members = [(number, self.get(number), tokens) for number, tokens in item.rooms]
        demand(all(member.group == item.group for _, member, _ in members))
        demand(len(dict(item.rooms)) == len(item.rooms))
        grown = [(number, member.room // SIZE) for number, member, tokens in members if tokens > member.room]
        for kind in self.kinds:
            for _, sequence, tokens in members:
                for position in range(sequence.room, tokens):
                    self.make_writable(kind, sequence.tables[kind.number], position // SIZE)
        for _, sequence, tokens in members:
            if tokens > sequence.room:
                sequence.room = -(-tokens // SIZE) * SIZE
        for number, first_index in grown:
            self.add_table(number, first_index)

    def make_writable(self, kind, table, index):
        source = table.get(index)
        if source is None:
            table[index] = self.grant(kind)
        elif self.holders(kind, kind.device).count(source) > 1 or kind.device.content(source):
            table[index] = self.grant(kind)
            kind.answer["copies"].append((source, table[index]))
            if source in kind.device.lost:
                kind.device.lost[table[index]] = None
            if source not in self.holders(kind, kind.device):
                kind.late.append(source)

    def allocate(self, item):
        demand(item.sequence not in self.sequences, StepRefusal.ALREADY_EXISTS)
        demand(not self.members(item.group), StepRefusal.ALREADY_EXISTS)
        demand(item.token_ids and item.compute_tokens > 0 and item.spare_blocks >= 0)
        root, prompt = (self.resets, item.salt), list(item.token_ids)
        contents = [(*root, *prompt[: end * SIZE]) for end in range(1, (len(prompt) - 1) // SIZE + 1)]
        found, boundary = self.longest(self.kinds[0], contents), self.boundary(contents)
        sequence = KindsSequence(item.group, root, prompt, [{} for _ in self.kinds])
        hits = [self.hits(kind, contents, boundary) for kind in self.kinds]
        for kind, own in zip(self.kinds, hits, strict=True):
            self.hold(kind, own)
            self.demand_room(kind, item, boundary, own)
        cached = boundary * SIZE
        room = max(-(-min(len(prompt), cached + item.compute_tokens) // SIZE), 0)
        for kind, own in zip(self.kinds, hits, strict=True):
            table = sequence.tables[kind.number]
            for index, (content, block, parked) in own.items():
                table[index] = block or self.bring_back(kind, content, parked)
            for index in range(boundary, room):
                table[index] = self.grant(kind)
        sequence.room, sequence.computed, sequence.position = room * SIZE, cached, cached
        sequence.contents = contents[:boundary]
        sequence.boundaries = {(len(prompt) - 1) // SIZE, boundary, found}
        if found > boundary:
            self.note("hit: cut to what the windows have")
        elif boundary:
            self.note("hit: in all kinds")
        self.sequences[item.sequence] = sequence
        self.add_table(item.sequence, cached=cached)
        self.answer["hit"] += cached
        self.answer["asked"] += len(prompt)

    @staticmethod
    def find(kind, content):
        return kind.device.find(content) or kind.host.find(content)

    def boundary(self, contents):
        """Return the most blocks behind which each kind has what the next token sees."""
        found = self.longest(self.kinds[0], contents)
        return max(count for count in range(found + 1) if self.all_have(contents, count))

    def longest(self, kind, contents):
        missing = [index for index, content in enumerate(contents) if not self.find(kind, content)]
        return min(missing, default=len(contents))

    def all_have(self, contents, count):
        """Whether each kind has the blocks that the token behind `count` blocks sees."""
        needed = [(kind, index) for kind in self.kinds for index in range(count) if kind.needs(count * SIZE, index)]
        return all(self.find(kind, contents[index]) for kind, index in needed)

    def hits(self, kind, contents, boundary):
        needed = [index for index in range(boundary) if kind.needs(boundary * SIZE, index)]
        return {
            index: (contents[index], kind.device.find(contents[index]), kind.host.find(contents[index]))
            for index in needed
        }

    def hold(self, kind, hits):
        for _, block, parked in hits.values():
            if block in kind.device.order:
                kind.device.order.remove(block)
            elif not block and parked in kind.host.order:
                kind.host.order.remove(parked)
                kind.host.order.append(parked)

    def demand_room(self, kind, item, boundary, hits):
        """Demand room for the whole prompt; of a window kind for what it has at once while it is computed."""
        more = -(-len(item.token_ids) // SIZE) - boundary
        if kind.tokens:
            at_once = -(-(kind.tokens - 1 + min(item.compute_tokens, len(item.token_ids))) // SIZE) + 1
            more = min(more, max(0, at_once - len(hits)))
        promoted = sum(not block for _, block, _ in hits.values())
        spare = item.spare_blocks if not kind.tokens else 0
        demand(more + promoted + spare <= len(kind.device.order), StepRefusal.OUT_OF_BLOCKS)

    def bring_back(self, kind, content, parked):
        block = self.grant(kind)
        self.seal(kind, kind.device, block, content)
        kind.answer["host_to_device"].append((parked, block))
        return block

    def length(self, item):
        sequence = self.get(item.sequence, anywhere=True)
        demand(0 <= item.tokens <= sequence.room)
        sequence.computed = item.tokens


class RandomKinds(RandomSteps):
    """The same Steps, with trims, on a pool with window kinds."""

    @initialize(
        blocks=st.sampled_from([3, 4, 5, 6, 8]),
        host_blocks=st.sampled_from([0, 2, 3, 4]),
        windows=st.sampled_from(WINDOWS),
        sizes=st.lists(st.sampled_from([2, 3, 4, 6]), min_size=4, max_size=4),
        retention=st.sampled_from([0, 0, SIZE, 2 * SIZE]),
    )
    def begin(self, blocks, host_blocks, windows, sizes, retention):
        kinds = tuple(
            WindowKind(f"w{number}", tokens, sizes[number], sizes[2 + number] - 2, chunked)
            for number, (tokens, chunked) in enumerate(windows)
        )
        spec = PoolSpec("engine", 1, "model", SIZE, blocks, host_blocks, windows=kinds, retention_tokens=retention)
        self.pool, self.again = Pool(spec), Pool(spec)
        own = [
            TwinKind(number, one.device_blocks, one.host_blocks, one.tokens, one.chunked)
            for number, one in enumerate(kinds, 1)
        ]
        self.twin = KindsTwin([TwinKind(0, blocks, host_blocks), *own], retention)
        self.keys, self.last_id, self.damaged = {}, 0, False
        self.audit = self.slices = None
        self.short_slices = [
            mock.patch.object(module, "_SLICE", 2) for module in (audit, table_follower, tier, key_index)
        ]
        self.short_slices.append(mock.patch.object(parts, "PART", 1))
        for patch in self.short_slices:
            patch.start()

    @precondition(lambda self: self.sound_blocks_of_windows())
    @rule(data=st.data())
    def damage_a_window_until_an_audit_blames_it(self, data):
        number, host, block = data.draw(st.sampled_from(self.sound_blocks_of_windows()), "block")
        state, twin = self.pool.state.kinds[number], self.twin.kinds[number]
        tier_ = state.host if host else state.device
        possible = [damage for damage, fits in DAMAGES.items() if fits(tier_, block)]
        data.draw(st.sampled_from(possible), "damage")(tier_, block)
        self.damaged = True
        while not (found := self.next_slice()):
            pass
        assert {(one.kind, one.block, one.host) for one in found} == {(number, block, host)}
        (twin.host if host else twin.device).blame(block)
        event(f"blamed: in a window's {'host' if host else 'device'}")
        assert self.pool.violations() == []
        self.check_tiers()

    def sound_blocks_of_windows(self):
        return [
            (kind.number, host > 0, block)
            for kind in self.twin.kinds[1:]
            for host, its in enumerate((kind.device, kind.host))
            for block in range(1, its.total + 1)
            if block not in its.blamed
        ]

    def worthwhile(self, kind):
        kind = super().worthwhile(kind)
        return "trims" if kind == "lengths" else kind

    def scarce(self):
        return any(3 * len(kind.device.blamed) >= kind.device.total for kind in self.twin.kinds)

    def draw_condemns(self, draw, rare):
        number = draw(st.integers(-rare, len(self.twin.kinds) - 1 + rare), "kind")
        kind = self.twin.kinds[number] if 0 <= number < len(self.twin.kinds) else self.twin.kinds[0]
        return self.condemn_of(draw, rare, kind.device, kind.host, number)

    def draw_trims(self, draw, rare):
        number = self.some_sequence(draw, rare, lambda one: not one.swapped and one.room > one.position)
        sequence = self.twin.sequences.get(number)
        low, high = (sequence.position, sequence.room) if sequence else (0, 4)
        return Trim(number, draw(st.integers(low - rare, high + rare), "position"))

    def apply(self, **items):
        step = Step(self.pool.last_step + 1, **items)
        applied = self.pool.apply(step)
        if self.audit:
            self.audit.on_step(applied)
        self.twin.apply(step)
        assert self.pool.violations() == []
        refusals = [(refusal.item, refusal.position, refusal.reason) for refusal in applied.result.refusals]
        assert refusals == self.twin.answer["refusals"]
        assert (applied.hit_tokens, applied.query_tokens) == (self.twin.answer["hit"], self.twin.answer["asked"])
        for kind, own in zip(self.twin.kinds, (applied, *applied.windows), strict=True):
            self.check_kind(kind, own)
        self.check_state(applied)
        for number, result in enumerate((applied.result, *applied.result.windows)):
            for block in result.withheld_blocks:
                self.again.withhold([block], [], number)
            for block in result.host_withheld_blocks:
                self.again.withhold([], [block], number)
        assert self.in_slices(step) == applied
        self.check_report()
        for what in self.twin.answer["events"]:
            event(what)

    def check_report(self):
        """A report is adopted as an equal pool, unless an index is damaged."""
        if self.damaged:
            return
        report = report_of(self.pool)
        adopted = end_of(adopt(self.pool.spec, report))
        assert adopted.violations() == []
        assert report_of(adopted) == report

    def in_slices(self, step):
        self.again.state.stepping = True
        try:
            return super().in_slices(step)
        finally:
            self.again.state.stepping = False

    def check_kind(self, kind, applied):
        for name in (*COPIES, "tables"):
            assert list(getattr(applied.result, name)) == kind.answer[name], (kind.number, name)
        for name in ("sealed", "host_sealed", "evicted"):
            for (block, key), (twins_block, content) in zip(getattr(applied, name), kind.answer[name], strict=True):
                assert block == twins_block, (kind.number, name)
                assert self.keys.setdefault(content, key) == key, (kind.number, name)

    def check_state(self, applied):
        for kind, state in zip(self.twin.kinds, self.pool.state.kinds, strict=True):
            assert {
                number: (one.group, one.table, one.dropped, one.room_tokens, one.committed_blocks, one.swapped)
                for number, one in state.sequences.items()
            } == {
                number: (
                    *(one.group, one.table(kind.number), self.twin.first(one, kind)),
                    *(one.room, one.committed, one.swapped),
                )
                for number, one in self.twin.sequences.items()
            }
            assert state.pins == kind.pins
        self.check_lookup()
        self.check_tiers()

    def check_lookup(self):
        """A lookup finds what an allocate would hit."""
        known = [content for content in self.twin.device.contents.values() if content[0] == self.twin.resets]
        for _, salt, *tokens in sorted(known, key=len)[-2:]:
            contents = [(self.twin.resets, salt, *tokens[: end * SIZE]) for end in range(1, len(tokens) // SIZE + 1)]
            (found,) = end_of(lookup_prefix([self.pool.state], array("i", [*tokens, 0]), salt))
            assert found.device_tokens + found.host_tokens == self.twin.boundary(contents) * SIZE

    def check_tiers(self):
        for kind, state in zip(self.twin.kinds, self.pool.state.kinds, strict=True):
            self.check_tier_of(kind, state.device, kind.device)
            self.check_tier_of(kind, state.host, kind.host)

    def check_tier_of(self, kind, own, twin):
        blocks = range(1, twin.total + 1)
        holders = self.twin.holders(kind, twin)
        assert [own.ref_count(block) for block in blocks] == [holders.count(block) for block in blocks]
        assert own.eviction_order() == twin.order
        contents = [twin.content(block) for block in blocks]
        assert [own.key(block) for block in blocks] == [content and self.keys[content] for content in contents]
        for content, key in self.keys.items():
            assert own.keys.find(key) == twin.find(content)


RandomKinds.TestCase.settings = random_runs(examples=250, steps=9)
TestRandomKinds = RandomKinds.TestCase
