"""Small scenarios that once violated an invariant; each by the fault that it found in the product or the simulator."""

from dataclasses import replace

from engine.schedule.limits import Limits
from simulation.network.connections import Latency
from simulation.processes.attached import EngineSize
from simulation.processes.gateway import GatewayLimits
from simulation.processes.manager import ManagerLimits
from simulation.scenario import PlannedFault, PlannedRequest, Scenario

SMALL, LARGE = EngineSize(3, 5, 0), EngineSize(3, 12, 0)
FAST = Latency(0.0002, 0.05, 0.0)


def request(at: float, name: str, prompt: tuple[int, ...], max_tokens: int) -> PlannedRequest:
    """Return a request of one sample, without bounds."""
    return PlannedRequest(
        at=at,
        gateway=0,
        name=name,
        prompt=prompt,
        max_tokens=max_tokens,
        samples=1,
        beams=0,
        seed=7,
        stop="",
        salt="",
        priority=0,
        timeout=None,
        cancel_after=None,
    )


def scenario(
    size: EngineSize,
    requests: tuple[PlannedRequest, ...],
    faults: tuple[PlannedFault, ...],
    latency: Latency = FAST,
) -> Scenario:
    """Return a scenario of one engine and one gateway, on a fast network unless given."""
    return Scenario(
        order=1,
        engines=(size,),
        steps=(),
        gateways=(GatewayLimits(),),
        manager=ManagerLimits(),
        latency=latency,
        requests=requests,
        faults=faults,
    )


FOUND = {
    "a request that a withheld block left no room for stopped all later ones": scenario(
        EngineSize(3, 4, 0, Limits(token_budget=24, max_sequences=3)),
        (
            request(1.0, "whole-pool", (7, 5, 6, 2, 6, 1, 3, 6, 2, 5), 1),
            request(2.0, "fits", (7, 5, 6), 3),
        ),
        (PlannedFault(0.5, "withhold a block", 0, 1.0),),
    ),
    "a request that a withheld block left no room for stopped one that was refused with it": scenario(
        EngineSize(4, 2, 0, Limits(token_budget=8, max_sequences=6)),
        (
            request(2.0, "whole-pool", (5, 7, 6, 5, 4, 5, 1), 1),
            request(2.0001, "refused-with-it", (4,), 3),
        ),
        (PlannedFault(1.9, "withhold a block", 0, 0.5),),
        Latency(0.02, 0.05, 0.0),
    ),
    "a request too large for one engine was refused although another had room": replace(
        scenario(SMALL, (request(6.0, "large", (2, 5), 16),), ()), engines=(SMALL, LARGE)
    ),
    "a request moved to an engine that was too small for it": replace(
        scenario(
            LARGE,
            (request(6.0, "large", (2, 5), 16),),
            (PlannedFault(6.1, "kill an engine"),),
            Latency(0.02, 0.05, 0.0),
        ),
        engines=(LARGE, SMALL),
        order=1,
    ),
    "a request whose engine was lost before a token was refused because the other one is too small": replace(
        scenario(
            LARGE,
            (request(6.0, "large", (2, 5), 16),),
            (PlannedFault(4.0, "silence an engine", seconds=4.0), PlannedFault(4.1, "start a second engine")),
        ),
        engines=(LARGE, SMALL),
        order=2,
    ),
    "the simulator took an engine's older process, which no gateway reaches, for one that could serve": replace(
        scenario(
            EngineSize(
                block_size=3,
                device_blocks=11,
                host_blocks=10,
                limits=Limits(token_budget=8, max_sequences=5, max_waiting=1000, admission_watermark=0.1),
                step_seconds=0.005,
            ),
            (request(9.13673433093065, "r53", (7, 2, 2, 5), 8)._replace(seed=29051, stop="d", priority=3),),
            (
                PlannedFault(6.71051031259276, "start a second engine"),
                PlannedFault(6.748588010764726, "start a second manager"),
                PlannedFault(6.843119024258473, "kill a gateway", number=4),
                PlannedFault(9.158516528743993, "reconnect an engine", number=3, seconds=4.0),
            ),
            Latency(usual=0.002, late=0.05, late_share=0.2),
        ),
        order=1173171956,
        manager=ManagerLimits(lease_seconds=0.3),
    ),
    "the simulator took an engine's newer process, to which no gateway had a link, for one that could serve": replace(
        scenario(
            EngineSize(
                block_size=1,
                device_blocks=8,
                host_blocks=8,
                limits=Limits(token_budget=8, max_sequences=1, max_waiting=1000, admission_watermark=0.5),
                keeps=True,
            ),
            (request(3.1495123854361498, "r59", (1, 5, 7), 2)._replace(seed=53465),),
            (
                PlannedFault(at=0.3563508625277423, kind="reconnect an engine", number=2, seconds=0.5),
                PlannedFault(at=2.2870435162659626, kind="start a second engine", number=3),
            ),
            Latency(usual=0.0002, late_share=0.0),
        ),
        order=1787369129,
        manager=ManagerLimits(step_work=4),
    ),
}
