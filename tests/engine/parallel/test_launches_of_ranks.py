"""A layer of a rank takes few launches: operators that compute, Triton kernels and collectives are counted."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from engine.attention.backend import AttentionBackend
from engine.model.decoder import Decoder
from engine.model.loading import load_model
from engine.parallel import OneRank
from engine.parallel.llama import ParallelLlama
from engine.parallel.loading import ModelFolder
from engine.run.runner import ModelRunner
from engine.schedule.step_plan import Work
from tests.engine.families import FAMILIES, write_checkpoint
from tests.engine.launch_tape import EMPTY
from tests.engine.triton_case import DEVICE, make_triton_backend
from tests.engine_in_process import GREEDY

pytest.importorskip("triton")

from engine.gpu.graphs import RecordedDecoder
from engine.gpu.llama import LlamaDecoder

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="launches are counted under the interpreter")

CPU = torch.device("cpu")
DECODING = (Work(1, (5,), 0, (1,), True, GREEDY), Work(2, (6,), 0, (2,), True, GREEDY))
MIXED = (Work(1, (5,), 0, (1,), True, GREEDY), Work(2, (6, 7, 8), 0, (2,), True, GREEDY))
PRODUCTS = {"aten.linear": 4}
DECODES = {"_decode": 1}
BESIDE = {"_write_rotated": 1, "_add_and_norm": 2, "_silu_gated": 1}


class OfTwoAlike(OneRank):
    """Rank 0 of two whose values are always equal."""

    size = 2

    def __init__(self) -> None:
        self.collectives = 0

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return self._noted(values.mul_, 2)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        return self._noted(torch.stack, (values, values))

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return self.all_gather(values)

    def _noted(self, run: Any, *arguments: Any) -> torch.Tensor:
        self.collectives += 1
        with _disable_current_modes():
            result: torch.Tensor = run(*arguments)
        return result


class Computing(TorchDispatchMode):
    """Counts the operators that compute: no views, and no allocations."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.overloadpacket not in EMPTY:
            self._counts[str(func.overloadpacket)] += 1
        return func(*args, **kwargs or {})


@contextmanager
def counting() -> Iterator[Counter[str]]:
    from triton.runtime.interpreter import InterpretedFunction

    counts: Counter[str] = Counter()
    plain = InterpretedFunction.run

    def run(kernel: Any, *arguments: Any, **named: Any) -> None:
        counts[kernel.__name__] += 1
        with _disable_current_modes():
            plain(kernel, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch, Computing(counts):
        patch.setattr(InterpretedFunction, "run", run)
        yield counts


def decoder_of(folder: Path, ranks: OfTwoAlike, *, fused: bool) -> tuple[Any, AttentionBackend, Decoder]:
    mine = ModelFolder(folder, 2).load(ranks, torch.float32, CPU)
    backend = make_triton_backend()(mine.loaded.geometry, 16, 12, torch.float32)
    decoder = mine.decoder(backend)
    return mine.loaded, backend, decoder if fused else ParallelLlama(decoder.own, backend)  # type: ignore[attr-defined]


def launches(folder: Path, work: tuple[Work, ...], *, fused: bool = True) -> Counter[str]:
    ranks = OfTwoAlike()
    loaded, backend, decoder = decoder_of(folder, ranks, fused=fused)
    runner = ModelRunner(loaded, backend, 16, decoder=decoder)
    before = ranks.collectives
    with counting() as counts:
        runner.forward(work)
    counts["collectives"] = ranks.collectives - before
    return counts


def of_a_layer(folder: Path, work: tuple[Work, ...], *, fused: bool = True) -> dict[str, int]:
    """Return what three layers launch more than two."""
    found = []
    for layers in (2, 3):
        family = FAMILIES["qwen3"]
        own = folder / str(layers)
        own.mkdir(exist_ok=True)
        write_checkpoint(family._replace(config=family.config | {"num_hidden_layers": layers}), own)
        found.append(launches(own, work, fused=fused))
    return dict(found[1] - found[0])


def test_a_layer_of_decoding_takes_eleven_launches_two_of_them_collectives(tmp_path: Path) -> None:
    assert of_a_layer(tmp_path, DECODING) == {**PRODUCTS, **DECODES, **BESIDE, "collectives": 2}


def test_a_layer_of_decoding_beside_prompts_takes_at_most_fourteen(tmp_path: Path) -> None:
    found = of_a_layer(tmp_path, MIXED)
    assert found == {**PRODUCTS, **DECODES, **BESIDE, "_prefill": 1, "collectives": 2}
    assert sum(found.values()) <= 14


def test_torchs_operators_take_four_times_as_many(tmp_path: Path) -> None:
    """What the count finds without fused kernels, so that it does find operators."""
    found = of_a_layer(tmp_path, DECODING, fused=False)
    assert sum(found.values()) > 48


@pytest.mark.parametrize(("size", "rows", "gathered"), [(2, 1, True), (2, 9000, True), (4, 1, True), (4, 9000, False)])
def test_few_rows_are_gathered_and_many_are_reduced(tmp_path: Path, size: int, rows: int, gathered: bool) -> None:
    write_checkpoint(FAMILIES["qwen3"], tmp_path)
    ranks = OfTwoAlike()
    _, _, decoder = decoder_of(tmp_path, ranks, fused=True)
    ranks.size = size
    product = torch.ones(rows, 64)
    found = decoder.summed(product)  # type: ignore[attr-defined]
    assert found.shape == ((2, rows, 64) if gathered else (rows, 64))
    assert (found == (1 if gathered else 2)).all()


class Filling(TorchDispatchMode):
    """Notes the operators that write a tensor of this shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.noted: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if not func.is_view and func.overloadpacket not in EMPTY and getattr(result, "shape", None) == self.shape:
            self.noted.append(str(func.overloadpacket))
        return result


@pytest.mark.parametrize(("ranks", "written_by"), [(1, "aten.mm"), (2, "aten.cat")])
def test_a_recorded_step_writes_its_logits_once_where_each_has_its_place(
    tmp_path: Path, ranks: int, written_by: str
) -> None:
    family = FAMILIES["qwen3"]
    write_checkpoint(family._replace(config=family.config | {"num_hidden_layers": 1}), tmp_path)
    if ranks == 1:
        loaded = load_model(tmp_path, torch.float32, CPU)
        backend = make_triton_backend()(loaded.geometry, 16, 12, torch.float32)
        decoder: Decoder = LlamaDecoder.of_model(loaded.model, backend, loaded.context_tokens)
    else:
        loaded, _, decoder = decoder_of(tmp_path, OfTwoAlike(), fused=True)
    noted: list[str] = []

    def record(run: Any) -> tuple[Any, Any]:
        with Filling((3, loaded.vocabulary_size)) as filling:
            result = run()
        noted.extend(filling.noted)
        return run, result

    recorded = RecordedDecoder(decoder, record, 16, 6, [3], CPU)
    recorded.prepare(lambda done, of: None)
    assert noted == [written_by]
