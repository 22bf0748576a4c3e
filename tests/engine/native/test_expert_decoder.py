"""Models with mixtures of experts run by the native kernels: as close to float32 as transformers' own bfloat16."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.attention.backend import PagedBatch
from engine.model.decoder import Decoder
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from engine.native.cpu_backend import CpuBackend
from engine.native.cpu_class import NAMES
from engine.native.decoder import NativeDecoder, runs
from engine.native.kernels import Kernels
from engine.run.runner import ModelRunner
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work
from services.engine.startup.native_kernels import decoder_for
from tests.engine import native_kernels
from tests.engine.decoding import logits, prompt
from tests.engine.expert_models import EXPERT_MODELS, ExpertModel, difference, write_expert_model
from tests.reference import reference_model

CPU = torch.device("cpu")
BLOCK = 16
NEW_TOKENS = 12
TEXTS = (b"The mill stands where the river bends, and", b"Flour is ground from", b"Why?")

Folder = Callable[[str], Path]


@pytest.fixture(scope="module", params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return native_kernels.kernels(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return cache(lambda kind: write_expert_model(EXPERT_MODELS[kind], tmp_path_factory.mktemp("experts") / "model"))


def parts_of(
    kernels: Kernels, folder: Path, blocks: int = 32, kv_dtype: torch.dtype = torch.bfloat16, threads: int = 2
) -> tuple[LoadedModel, CpuBackend, NativeDecoder]:
    loaded = load_model(folder, torch.bfloat16, CPU)
    backend = CpuBackend(kernels, loaded.geometry, BLOCK, blocks, torch.bfloat16, threads=threads, kv_dtype=kv_dtype)
    decoder = decoder_for(kernels, loaded, backend, threads)
    assert decoder is not None, "it matches the model's modules"
    assert decoder.from_files
    return loaded, backend, decoder


def runner_of(kernels: Kernels, folder: Path, *sizes: Any, **more: Any) -> ModelRunner:
    loaded, backend, decoder = parts_of(kernels, folder, *sizes, **more)
    return ModelRunner(loaded, backend, BLOCK, decoder=decoder)


def logits_of_each(decoder: Decoder, tokens: tuple[int, ...], start: int, table: tuple[int, ...]) -> torch.Tensor:
    """Feed the tokens from an index on; return the float32 logits of each."""
    work, fed = Work(1, tokens[start:], start, table, True, Sampling()), torch.arange(len(tokens) - start)
    batch = PagedBatch.of([work], BLOCK, CPU)
    return decoder.logits(torch.tensor(tokens[start:]), fed + start, fed, batch).clone()


@pytest.mark.parametrize("kind", EXPERT_MODELS)
def test_logits_are_as_close_to_float32_as_those_of_transformers(kernels: Kernels, folder: Folder, kind: str) -> None:
    """At the median of a prompt's tokens, of which the last ones decode: a near tie of experts moves single tokens."""
    _, _, decoder = parts_of(kernels, folder(kind))
    tokens, table, ends = prompt(70, 1), (7, 3, 9, 1, 12), (0, 40, 66, 67, 68, 69, 70)
    found = [logits_of_each(decoder, tokens[:end], start, table) for start, end in pairwise(ends)]
    rounded = AutoModelForCausalLM.from_pretrained(folder(kind), dtype=torch.bfloat16, local_files_only=True).eval()
    with torch.inference_mode():
        models = reference_model(folder(kind)), rounded
        exact, close = (one(torch.tensor([tokens]), use_cache=False).logits[0].float() for one in models)
    ours, theirs = (difference(one, exact) for one in (torch.cat(found), close))
    assert ours < 1.1 * theirs + 0.002


@pytest.mark.parametrize("kind", EXPERT_MODELS)
def test_greedy_tokens_of_texts_are_the_likeliest_of_float32(kernels: Kernels, folder: Folder, kind: str) -> None:
    """Or nearly so: bfloat16 moves a logit by some hundredths of the logits' spread."""
    runner, model = runner_of(kernels, folder(kind)), reference_model(folder(kind))
    texts = [tuple(text) for text in TEXTS]
    tables = [tuple(range(8 * number + 1, 8 * number + 9)) for number in range(len(texts))]
    starts = [0] * len(texts)
    for _ in range(NEW_TOKENS):
        found = logits(runner, *zip(texts, starts, tables, strict=True)).argmax(dim=1).tolist()
        starts = [len(text) for text in texts]
        texts = [(*text, token) for text, token in zip(texts, found, strict=True)]
    for text, given in zip(texts, TEXTS, strict=True):
        with torch.inference_mode():
            exact = model(torch.tensor([text[:-1]]), use_cache=False).logits[0, len(given) - 1 :]
        chosen = exact.gather(1, torch.tensor(text[len(given) :])[:, None])[:, 0]
        assert float(((exact.amax(dim=1) - chosen) / exact.std(dim=1)).max()) < 0.3


@pytest.mark.parametrize("kind", EXPERT_MODELS)
@pytest.mark.parametrize(("count", "kv_dtype"), [(3, torch.bfloat16), (40, torch.bfloat16), (3, torch.int8)])
def test_a_sequence_gets_the_same_logits_alone_and_in_a_batch(
    kernels: Kernels, folder: Folder, kind: str, count: int, kv_dtype: torch.dtype
) -> None:
    """Forty prompts have bands of rows; other rows choose other experts. Half of the sequences decode."""
    runner = runner_of(kernels, folder(kind), 100, kv_dtype)
    tables = [(2 * seed + 1, 2 * seed + 2) for seed in range(count)]
    parts = [(prompt(30, seed), 29 if seed % 2 else 0, tables[seed]) for seed in range(count)]
    for tokens, start, table in parts:
        if start:
            logits(runner, (tokens[:start], 0, table))
    together = logits(runner, *parts)
    for number in range(0, count, max(1, count // 5)):
        assert torch.equal(logits(runner, parts[number])[0], together[number])


def test_a_step_of_one_thread_gives_the_logits_of_two(kernels: Kernels, folder: Folder) -> None:
    one, two = (runner_of(kernels, folder("gpt_oss"), threads=threads) for threads in (1, 2))
    part = prompt(70, 1), 0, (7, 3, 9, 1, 12)
    assert torch.equal(logits(one, part), logits(two, part))


@pytest.mark.parametrize("kind", EXPERT_MODELS)
def test_a_gate_that_is_not_a_multiple_of_16_runs_the_modules(kind: str, tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 40} if kind.startswith("qwen") else {"intermediate_size": 40}
    model = ExpertModel(EXPERT_MODELS[kind].name, EXPERT_MODELS[kind].config | sizes)
    assert not runs(load_model(write_expert_model(model, tmp_path), torch.bfloat16, CPU).model)
