"""Log-probabilities of the demo model equal those of transformers."""

from pathlib import Path

from tests.engine.run.test_logprobs import check
from tests.engine_in_process import ModelEngine


def test_logprobs_equal_transformers_in_small_steps_and_after_preemptions(demo_model: Path) -> None:
    engine = ModelEngine(demo_model, block_size=4, device_blocks=12, token_budget=6, max_sequences=4)
    text = [504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 30, 657, 253, 3365, 1194, 28, 260]
    prompts = [text[:2], [*text, *text[::-1]][:19]]
    names = [engine.submit(prompt, 30, logprobs=3, prompt_logprobs=3) for prompt in prompts]
    engine.run()
    assert engine.scheduler.totals.preemptions > 0
    for name, prompt in zip(names, prompts, strict=True):
        scored = [*engine.scored[name], *engine.sampled[name]]
        check(demo_model, [*prompt, *engine.tokens[name]], scored, 1, 3)
