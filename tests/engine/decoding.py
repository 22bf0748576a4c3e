"""Prompts of random tokens, and their logits."""

import torch

from engine.run.runner import ModelRunner
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple((seed * 31 + 7 * place * place) % 380 for place in range(length))


def logits(runner: ModelRunner, *parts: tuple[tuple[int, ...], int, tuple[int, ...]]) -> torch.Tensor:
    """Feed each part's tokens from an index on, with its block table; return the float32 logits after each part."""
    work = [
        Work(number, tokens[start:], start, table, True, Sampling())
        for number, (tokens, start, table) in enumerate(parts)
    ]
    with torch.inference_mode():
        return runner.forward(tuple(work)).float()
