"""Each mutable field of the engine has one writer: the module of its class, unless field_owners.md names another.

The check compares names. A write is an assignment to an attribute, a deletion of it, or a call that changes its value,
such as `append`. A write through `self` is of the class around it; any other is from outside.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = (
    *("engine/schedule", "engine/schedule/planning", "engine/schedule/pool", "engine/schedule/speculation"),
    *("engine/run", "services/engine"),
)
# Classes in the table, and the modules that define them.
OWNERS = {
    "Sequence": "engine/schedule/sequence_group.py",
    "Group": "engine/schedule/sequence_group.py",
    "RequestStats": "engine/schedule/stats.py",
    "SchedulerTotals": "engine/schedule/stats.py",
    "Beams": "engine/schedule/beams.py",
    "RequestQueue": "engine/schedule/request_queue.py",
    "LiveRequests": "engine/schedule/live_requests.py",
    "RequestEndings": "engine/schedule/endings.py",
    "Outputs": "engine/schedule/outputs.py",
    "PoolView": "engine/schedule/pool/pool_view.py",
    "WindowView": "engine/schedule/pool/window_view.py",
    "PrefixClaims": "engine/schedule/pool/prefix_claims.py",
    "CachedPrefixes": "engine/schedule/pool/cached_prefixes.py",
    "PrefillOrder": "engine/schedule/planning/prefill_order.py",
    "Releases": "engine/schedule/pool/releases.py",
    "Condemnations": "engine/schedule/pool/condemnations.py",
    "Recomputations": "engine/schedule/pool/proven_blocks.py",
    "BlockPlanner": "engine/schedule/pool/block_planner.py",
    "Admissions": "engine/schedule/pool/admission.py",
    "Extensions": "engine/schedule/pool/extensions.py",
    "Victims": "engine/schedule/pool/preemption.py",
    "PreemptionCosts": "engine/schedule/pool/preemption.py",
    "Speculator": "engine/schedule/speculation/speculator.py",
    "NgramIndex": "engine/schedule/speculation/ngram_index.py",
    "AcceptanceRates": "engine/schedule/speculation/acceptance.py",
    "SpeculationCosts": "engine/schedule/speculation/speculation_costs.py",
    "PinnedPrefix": "engine/schedule/pool/pins.py",
    "Pins": "engine/schedule/pool/pins.py",
    "Engine": "engine/run/loop.py",
    "StepMonitor": "services/engine/driver.py",
    "EngineDriver": "services/engine/driver.py",
    "GatewayRequests": "services/engine/gateway_requests.py",
    "ManagerMonitor": "services/engine/manager_monitor.py",
}
CHANGING = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popleft", "remove", "setdefault"),
    *("sort", "subtract", "update"),
}
# Also the names of fields of messages that services/engine writes.
MESSAGES = {"detail", "failure", "started", "tokens"}


class Write(NamedTuple):
    """A write in a class (empty outside of any) and function; `own`: through `self`."""

    path: str
    line: int
    scope: str
    function: str
    field: str
    own: bool


def written(node: ast.AST) -> Iterator[ast.Attribute]:
    """Return the attributes that a node changes, without those of its children."""
    targets: list[ast.expr] = []
    match node:
        case ast.Assign() | ast.Delete():
            targets = list(node.targets)
        case ast.AugAssign():
            targets = [node.target]
        case ast.AnnAssign(value=ast.expr()):
            targets = [node.target]
        case ast.Call(func=ast.Attribute(value=ast.Attribute() as changed, attr=name)) if name in CHANGING:
            targets = [changed]
        case ast.Call(func=ast.Name(id="insort"), args=[ast.Attribute() as changed, *_]):
            targets = [changed]
    while targets:
        match targets.pop():
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                targets += parts
            case ast.Subscript(value=part) | ast.Starred(value=part):
                targets.append(part)
            case ast.Attribute() as attribute:
                yield attribute


def writes_in(path: str, source: str) -> Iterator[Write]:
    def walk(node: ast.AST, scope: str, function: str) -> Iterator[Write]:
        for attribute in written(node):
            own = isinstance(attribute.value, ast.Name) and attribute.value.id == "self"
            yield Write(path, attribute.lineno, scope, function, attribute.attr, own)
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.ClassDef():
                    yield from walk(child, child.name, "")
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    yield from walk(child, scope, function or child.name)
                case _:
                    yield from walk(child, scope, function)

    yield from walk(ast.parse(source), "", "")


def all_writes() -> list[Write]:
    paths = [path for room in ROOMS for path in sorted((ROOT / room).glob("*.py"))]
    return [write for path in paths for write in writes_in(str(path.relative_to(ROOT)), path.read_text())]


def fields_of(name: str) -> set[str]:
    """Return the names of a class's fields."""
    tree = ast.parse((ROOT / OWNERS[name]).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    annotated = {node.target.id for node in found.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    assigned = {
        write.field
        for write in writes_in(OWNERS[name], ast.unparse(found))
        if write.own and write.function == "__init__"
    }
    return annotated | assigned


def table() -> dict[str, dict[str, str]]:
    """Return the table of `field_owners.md`: the fields of each class, and the class that writes each."""
    text = Path(__file__).with_name("field_owners.md").read_text()
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for row in re.findall(r"^\| `(\w+)` \| (.+?) \| `(\w+)` \|$", text, re.M):
        found[row[0]].update(dict.fromkeys(re.findall(r"`(\w+)`", row[1]), row[2]))
    return found


def writers_elsewhere() -> dict[str, str]:
    """Return the fields that are not written by their own class, and the modules that write them."""
    return {
        field: OWNERS[writer]
        for name, fields in table().items()
        for field, writer in fields.items()
        if OWNERS[writer] != OWNERS[name]
    }


def violations(writes: list[Write], owned: dict[str, set[str]]) -> list[Write]:
    """Return the writes to owned fields (with the modules whose classes have them) from outside."""
    elsewhere = writers_elsewhere()
    found = []
    for write in writes:
        if write.field in elsewhere and (not write.own or write.scope in ("Sequence", "Group")):
            allowed = {elsewhere[write.field]}
        elif write.own or write.field not in owned:
            continue
        else:
            allowed = owned[write.field]
        if write.path not in allowed and not (write.path.startswith("services/") and write.field in MESSAGES):
            found.append(write)
    return found


@pytest.fixture(scope="module")
def owned() -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for name, path in OWNERS.items():
        for field in fields_of(name):
            found[field].add(path)
    return found


def test_no_field_is_written_from_outside_its_writer(owned: dict[str, set[str]]) -> None:
    assert violations(all_writes(), owned) == []


@pytest.mark.parametrize(
    "line",
    [
        "view.available -= 1",
        "self._view.capacity = capacity",
        "sequence.table = []",
        "del sequence.table[3:]",
        "sequence.room, sequence.computed = 0, 0",
        "self._queue.running.pop()",
        "queue.admitting[group.id] = group",
        "group.members.remove(member)",
        "insort(queue.waiting, group)",
        "self._engine.last_failure = None",
    ],
)
def test_a_write_from_outside_is_found(line: str, owned: dict[str, set[str]]) -> None:
    assert violations(list(writes_in("engine/schedule/scheduler.py", line)), owned)


def test_a_class_does_not_write_a_field_that_another_class_writes(owned: dict[str, set[str]]) -> None:
    source = "class Sequence:\n    def lose(self):\n        self.table = []"
    assert violations(list(writes_in(OWNERS["Sequence"], source)), owned)


@pytest.mark.parametrize("name", OWNERS)
def test_the_table_lists_what_changes_of_a_class(name: str) -> None:
    fields, elsewhere = fields_of(name), writers_elsewhere()
    changed = {
        write.field
        for write in all_writes()
        if write.field in fields
        and (
            (write.own and write.scope == name and write.function not in ("__init__", "__post_init__"))
            or (not write.own and write.path == elsewhere.get(write.field, OWNERS[name]))
        )
    }
    assert set(table().get(name, {})) == changed
