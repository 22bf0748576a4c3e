"""What must be true of an engine: it never sleeps with work."""

from engine.schedule.scheduler import IdleReason
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
        return [f"{engine.name} waits for an answer to a block step that is not in flight"]
    return []
