"""In bfloat16 two correct programs may generate different tokens.

At the first difference each side's token must be among the other's most likely; later tokens are not compared.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from engine.attention import TorchBackend
from engine.model.loading import load_model
from engine.run.runner import ModelRunner
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work
from quire.v1 import decoding_pb2, gateway_pb2
from tests.acceptance.conftest import ROOT, Record
from tests.dense_model import dense_folder
from tests.running_quire import RunningQuire

LENGTHS = (1, 2, 5, 16, 17, 31, 33, 50, 64, 65, 80, 100, 127, 128, 129, 150, 180, 200, 256, 257, 300, 350, 400, 512)
MAX_TOKENS = 16
TOP = 5
EOS = 2
BLOCK_SIZE = 16


def test_bfloat16_tokens_are_close_to_those_of_transformers(
    quire: Callable[..., RunningQuire], demo_model: Path, record: Record
) -> None:
    running = quire("--dtype", "bfloat16", "--weights", "bf16", "--device-blocks", "1024")
    tokenizer = tokenizers.Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    ids = tokenizer.encode((ROOT / "docs" / "architecture.md").read_text()).ids
    prompts = [ids[53 * position : 53 * position + length] for position, length in enumerate(LENGTHS)]
    with ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(lambda prompt: running.generate(_request(prompt)), prompts))
    folder = dense_folder(demo_model)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    ours = _OurLogits(demo_model)
    equal = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = _generate(theirs, prompt)
        place = next(
            (i for i, pair in enumerate(zip(answer.token_ids, expected, strict=False)) if len({*pair}) > 1), None
        )
        if place is None:
            equal += 1
            continue
        prefix = [*prompt, *expected[:place]]
        assert answer.token_ids[place] in _top(_their_logits(theirs, prefix))
        assert expected[place] in _top(ours(prefix))
    record(prompts=len(prompts), equal=equal, different_but_among_the_most_likely=len(prompts) - equal, top=TOP)


class _OurLogits:
    """Computes the engine's logits for a single sequence."""

    def __init__(self, folder: Path) -> None:
        loaded = load_model(folder, torch.bfloat16, torch.device("cpu"))
        blocks = 64
        backend = TorchBackend(loaded.geometry, BLOCK_SIZE, blocks, torch.bfloat16)
        self._runner = ModelRunner(loaded, backend, BLOCK_SIZE)
        self._table = tuple(range(1, blocks + 1))

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        work = Work(1, tuple(tokens), 0, self._table, True, Sampling(0.0))
        return self._runner.forward((work,))[0]


@torch.inference_mode()
def _their_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


def _generate(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    settings = GenerationConfig(do_sample=False, max_new_tokens=MAX_TOKENS, eos_token_id=EOS, pad_token_id=EOS)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return output[0, len(prompt) :].tolist()


def _top(logits: torch.Tensor) -> list[int]:
    return logits.float().topk(TOP).indices.tolist()


def _request(prompt: list[int]) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        prompt=gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=prompt)),
        sampling=decoding_pb2.Sampling(temperature=0),
        stopping=decoding_pb2.Stopping(max_tokens=MAX_TOKENS),
    )
