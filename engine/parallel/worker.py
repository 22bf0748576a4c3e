"""A rank other than 0: receives plans, and launches them."""

from collections.abc import Callable

import torch

from engine.gpu.current_device import on_device
from engine.parallel.plan_message import PlanDecoder
from engine.parallel.ranks import Ranks
from engine.run.forward import ForwardPass


class Worker:
    """Computes this rank's slice of every step. It has no requests, no scheduler and no block manager."""

    def __init__(self, ranks: Ranks, forward: ForwardPass, device: torch.device) -> None:
        self._ranks = ranks
        self._forward = forward
        self._device = device
        self._decoder = PlanDecoder()

    def run(self, receive: Callable[[], bytes | None], launched: Callable[[], None] = lambda: None) -> None:
        """Launch plans until `receive` returns None, and call `launched` after each.

        Raises RankFailed for a plan that is not the next one, CopyFailed, and what the decoder raises.
        """
        while (message := receive()) is not None:
            self.launch(message)
            launched()

    @torch.inference_mode()
    def launch(self, message: bytes) -> None:
        """Launch the plan of a message, behind all plans launched before."""
        plan, shares_tokens = self._decoder.decode(message)
        with on_device(self._device):
            self._forward.run(plan)
            if shares_tokens:
                count = sum(len(work.sample_indices) for work in plan.work if work.samples)
                tokens = torch.empty(count, dtype=torch.int64, device=self._device)
                self._forward.keep(plan.work, self._ranks.broadcast(tokens))
