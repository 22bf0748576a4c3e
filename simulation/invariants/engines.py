"""What must be true of an engine: no sleep with work, and the contents of its blocks."""

from engine.schedule.scheduler import IdleReason
from simulation.invariants.expected_contents import ExpectedContents
from simulation.processes.engine import EngineProcess


def sleep_faults(engine: EngineProcess) -> list[str]:
    """Return why an engine that sleeps should not. Call it where nothing of its process can run."""
    scheduler, link = engine.scheduler, engine.link
    if link.has_answers:
        return [f"{engine.name} sleeps, but an answer of its KV manager has arrived"]
    reason = scheduler.idle_reason(connected=link.ready)
    if reason is None:
        return [f"{engine.name} sleeps, although it could compute"]
    if reason is IdleReason.ANSWER and link.ready and not link.replica.steps_in_flight:
        return [f"{engine.name} waits for an answer to a Step that is not in flight"]
    return []


def content_faults(engine: EngineProcess, expected: ExpectedContents) -> list[str]:
    """Return the cached blocks with wrong contents. Call it where no Step and no copy is under way."""
    pool = engine.link.replica.pool
    found = expected.faults(pool.device, engine.runner.memory, host=False)
    found += expected.faults(pool.host, engine.runner.memory, host=True)
    return [f"{engine.name}: {fault}" for fault in found]
