"""What must be true: of a process after each part of a choice, and of a state."""

from functools import cache

from blocks import root_key
from simulation.exhaustive.process_structure import has_callbacks
from simulation.exhaustive.small_engine import SmallEngine, SmallRequest
from simulation.exhaustive.state import MANAGER, NEWER, OLDER, State
from simulation.invariants.engines import sleep_faults
from simulation.invariants.expected_contents import ExpectedContents
from simulation.invariants.marks import mark_faults
from simulation.processes.attached import FINGERPRINT
from simulation.processes.manager import ManagerProcess
from simulation.processes.process import Process

# Of the end of a request whose engine has been without a KV manager for too long.
_NO_MANAGER = "without its KV manager"


def process_faults(process: Process) -> list[str]:
    """Return what is wrong with a process that runs nothing at the moment."""
    if process.loop.failures:
        return process.loop.failures
    if isinstance(process, ManagerProcess):
        return _manager_faults(process)
    assert isinstance(process, SmallEngine), "it is a manager or an engine"
    return _engine_faults(process) + [fault for one in process.requests for fault in _request_faults(process, one)]


def _manager_faults(process: ManagerProcess) -> list[str]:
    process.manager.check_handshakes()
    pools = [session.pool for session in process.manager.sessions()]
    found = [f"pool of {pool.spec.engine_id}: {fault}" for pool in pools for fault in pool.violations()]
    found += [fault for pool in pools for tier in (pool.device, pool.host) for fault in mark_faults(tier)]
    return process.loop.failures + found


def _engine_faults(engine: SmallEngine) -> list[str]:
    """Return what is wrong with an engine that sleeps, or has computed all of its requests."""
    sleeps = (
        not has_callbacks(engine) and engine.pause is not None and not engine.driver.has_commands and not engine.exit
    )
    found = sleep_faults(engine) if sleeps else []
    if engine.scheduler.empty and not engine.link.replica.steps_in_flight and not engine.link.has_answers:
        found += _pool_faults(engine)
    return found


def _pool_faults(engine: SmallEngine) -> list[str]:
    pool = engine.link.replica.pool
    found = _contents(engine.requests).pool_faults(pool, engine.runner.memory)
    held = pool.device.counts.held + pool.host.counts.held
    return [*found, f"{held} blocks are held after all requests"] if held else found


@cache
def _contents(requests: tuple[SmallRequest, ...]) -> ExpectedContents:
    expected = ExpectedContents()
    for request in requests:
        expected.add(root_key(FINGERPRINT, b""), [*request.prompt, *request.expected()])
    return expected


def _request_faults(engine: SmallEngine, request: SmallRequest) -> list[str]:
    expected, tokens = request.expected(), engine.received.tokens.get(request.name, [])
    if tokens != expected[: len(tokens)]:
        return [f"{request.name}: {tokens} in place of {expected}"]
    end = engine.received.ends.get(request.name)
    if end:
        return [] if _NO_MANAGER in end else [f"{request.name} ends: {end}"]
    return [f"{request.name} ends after {tokens} of {expected}"] if end == "" and tokens != expected else []


def exit_faults(state: State, label: str, reason: str) -> list[str]:
    """Return what is wrong with an engine that its KV manager has refused: only the older one may be, by the newer."""
    if label == OLDER and state.spent.newer_started:
        return []
    return [f"{label} ends, although no newer process has its id: {reason}"]


def rest_faults(state: State) -> list[str]:
    """Return what is wrong with a state in which nothing happens unless time passes."""
    engines = {label: one for label, one in state.processes.items() if not label.startswith(MANAGER)}
    found = []
    for label, one in engines.items():
        if one.attached and one.unfinished:
            found.append(f"{label} is attached, and nothing happens, but {', '.join(one.unfinished)} have not ended")
        if not one.attached and one.timer_at is None:
            found.append(f"{label} is not attached, and waits for nothing")
    if all(label in engines and engines[label].attached for label in (OLDER, NEWER)):
        found.append("both incarnations are attached")
    return found
