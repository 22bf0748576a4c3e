"""Every family of docs/models.md gives the greedy tokens of transformers' `generate` in float32, its windows and soft
caps honoured; or is refused at start, with the reason.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.attention import TorchBackend
from engine.errors import InvalidRequest, ModelUnsupported
from engine.model.loading import load_model
from engine.model.model_shape import read_shape
from engine.run.runner import ModelRunner
from engine.schedule.step_plan import Work
from tests.engine.families import CONTEXT, FAMILIES, FURTHER, SMALL, WINDOW, WINDOWED, Checkpoint, Family
from tests.engine_in_process import GREEDY, ModelEngine, loaded_model
from tests.reference import greedy_reference, near_ties, reference_model

BLOCK_SIZE = 4
MAX_TOKENS = 16
LENGTHS = (1, 2, WINDOW, WINDOW + 1, 21, 40, CONTEXT - MAX_TOKENS)
# Of 112 tokens a run; random weights make choices clear.
FEW = 1

WITH_WINDOWS_OR_CAPS = [key for key, family in FAMILIES.items() if family.plain]

Prompt = Callable[[int], list[int]]


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Path:
    return checkpoint(FAMILIES[request.param])


@pytest.fixture
def prompts(random_prompt: Prompt) -> list[list[int]]:
    return [random_prompt(length) for length in LENGTHS]


def test_one_prompt_at_a_time(folder: Path, prompts: list[list[int]]) -> None:
    engine = ModelEngine(folder, block_size=BLOCK_SIZE)
    few = prompts[1::3]
    answers = [engine.generate([prompt], MAX_TOKENS)[0] for prompt in few]
    assert near_ties(folder, few, answers, MAX_TOKENS) <= FEW


def test_prompts_of_different_lengths_together(folder: Path, prompts: list[list[int]]) -> None:
    engine = ModelEngine(folder, block_size=BLOCK_SIZE)
    answers = engine.generate(prompts, MAX_TOKENS)
    assert engine.scheduler.totals.preemptions == 0
    assert near_ties(folder, prompts, answers, MAX_TOKENS) <= FEW
    assert len({token for answer in answers for token in answer}) > MAX_TOKENS, "the checkpoint is degenerate"


def test_prompts_longer_than_the_window_fed_in_chunks_shorter_than_it(folder: Path, prompts: list[list[int]]) -> None:
    engine = ModelEngine(folder, block_size=BLOCK_SIZE, token_budget=5, max_sequences=3)
    answers = engine.generate(prompts, MAX_TOKENS)
    assert engine.turns > sum(LENGTHS) // 5
    assert near_ties(folder, prompts, answers, MAX_TOKENS) <= FEW


def test_a_small_pool_with_preemptions(folder: Path, prompts: list[list[int]]) -> None:
    engine = ModelEngine(folder, block_size=BLOCK_SIZE, device_blocks=CONTEXT // BLOCK_SIZE, token_budget=16)
    answers = engine.generate(prompts, MAX_TOKENS)
    assert engine.scheduler.totals.preemptions >= 1
    assert near_ties(folder, prompts, answers, MAX_TOKENS) <= FEW


@pytest.mark.parametrize("name", FURTHER)
def test_further_families_in_chunks_and_together(checkpoint: Checkpoint, prompts: list[list[int]], name: str) -> None:
    folder = checkpoint(Family(name, FURTHER[name]))
    engine = ModelEngine(folder, block_size=BLOCK_SIZE, token_budget=16)
    answers = engine.generate(prompts, MAX_TOKENS)
    assert near_ties(folder, prompts, answers, MAX_TOKENS) <= FEW
    assert len({token for answer in answers for token in answer}) > MAX_TOKENS, "the checkpoint is degenerate"


@pytest.mark.parametrize("key", WITH_WINDOWS_OR_CAPS)
def test_ignored_windows_and_caps_would_change_the_answers(
    checkpoint: Checkpoint, prompts: list[list[int]], key: str
) -> None:
    family = FAMILIES[key]
    long_ones = prompts[-3:]
    honoured = greedy_reference(checkpoint(family), long_ones, MAX_TOKENS)
    ignored = greedy_reference(checkpoint(Family(family.name, family.config | family.plain)), long_ones, MAX_TOKENS)
    assert honoured != ignored


def test_the_documentation_names_every_case() -> None:
    document = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert [key for key in FAMILIES if f"`{key}`" not in document] == []


def test_logits_are_capped_as_in_transformers(checkpoint: Checkpoint, random_prompt: Prompt) -> None:
    folder, prompt = checkpoint(FAMILIES["gemma2 with low caps"]), random_prompt(20)
    loaded = loaded_model(folder)
    runner = ModelRunner(loaded, TorchBackend(loaded.geometry, 32, 2), 32)
    with torch.inference_mode():
        [ours] = runner.forward((Work(1, tuple(prompt), 0, (1,), True, GREEDY),))
        theirs = reference_model(folder)(torch.tensor([prompt])).logits[0, -1]
    assert theirs.abs().max() <= 5
    assert theirs.std() > 1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_the_context_of_long_rotations_ends_where_they_would_change(
    checkpoint: Checkpoint, random_prompt: Prompt
) -> None:
    folder = checkpoint(FAMILIES["phi3 with long rotations"])
    engine = ModelEngine(folder)
    assert engine.loaded.context_tokens == CONTEXT
    with pytest.raises(InvalidRequest, match=f"must be at most {CONTEXT} tokens"):
        engine.submit(random_prompt(CONTEXT), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_ignores_positions_is_refused_in_any_precision(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    folder = checkpoint(FAMILIES["llama"])
    load_model(folder, dtype, torch.device("cpu"))
    forward = LlamaForCausalLM.forward
    monkeypatch.setattr(
        LlamaForCausalLM, "forward", lambda self, position_ids, **others: forward(self, position_ids=None, **others)
    )
    with pytest.raises(ModelUnsupported, match="it ignores position_ids"):
        load_model(folder, dtype, torch.device("cpu"))


def test_a_model_is_fed_no_token_that_its_embeddings_by_layer_lack(
    checkpoint: Checkpoint, random_prompt: Prompt
) -> None:
    fed = 300
    sizes = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": fed, "num_hidden_layers": 2}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False}
    folder = checkpoint(Family("gemma4_text", WINDOWED | sizes | layers))
    engine = ModelEngine(folder, block_size=BLOCK_SIZE)
    assert engine.loaded.vocabulary_size == read_shape(folder, torch.float32).vocabulary_size == fed
    with pytest.raises(InvalidRequest, match=f"must be between 0 and {fed - 1}, not {fed}"):
        engine.submit([5, fed], 1)
    prompts = [[token % fed for token in random_prompt(length)] for length in (9, 30)]
    later = list(range(fed, SMALL["vocab_size"]))
    for prompt, tokens in zip(prompts, engine.generate(prompts, MAX_TOKENS), strict=True):
        found = reference_model(folder).generate(
            torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False, suppress_tokens=later
        )
        assert tokens == found[0, len(prompt) :].tolist()
