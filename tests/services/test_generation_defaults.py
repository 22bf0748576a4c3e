"""Running services with a model whose generation_config.json recommends values: what requests leave out."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
from transformers import GenerationConfig

from quire.v1 import gateway_pb2
from tests.reference import reference_model
from tests.running_quire import CALL_SECONDS, START_SECONDS, RunningQuire, start_quire

PROMPT = "Blocks of keys and values"
MAX_TOKENS = 48
# Sampling of one token: five answers of five are equal, and greedy.
VALUES = {"do_sample": True, "temperature": 0.1, "top_k": 1, "repetition_penalty": 1.3, "max_new_tokens": MAX_TOKENS}


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tiny model with VALUES."""
    copy = tmp_path_factory.mktemp("defaults") / "tiny-llama"
    shutil.copytree(tiny_model("llama"), copy)
    path = copy / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | VALUES))
    return copy


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[RunningQuire]:
    one = start_quire("--model", str(folder), "--device-blocks", "64", "--http-listen", "127.0.0.1:0")
    yield one
    one.close()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def generated(folder: Path, tokenizer: tokenizers.Tokenizer, **changes: Any) -> list[int]:
    """Return the new tokens of transformers' `generate` with the values of the folder's file."""
    settings = GenerationConfig.from_pretrained(folder, **changes)
    ids = torch.tensor([tokenizer.encode(PROMPT).ids])
    with torch.inference_mode():
        output = reference_model(folder).generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return output[0, ids.shape[1] :].tolist()


def request(**fields: Any) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(prompt={"text": PROMPT}, **fields)  # type: ignore[arg-type]


def test_greedy_answers_equal_those_of_generate_with_the_file(
    served: RunningQuire, folder: Path, tokenizer: tokenizers.Tokenizer
) -> None:
    answer = served.generate(request(sampling={"temperature": 0.0}))
    assert answer.token_ids == generated(folder, tokenizer, do_sample=False)
    without = generated(folder, tokenizer, do_sample=False, repetition_penalty=1.0)
    assert answer.token_ids != without, "the penalty changes the answer"
    plain = request(sampling={"temperature": 0.0}, logit_rules={"repetition_penalty": 1.0})
    assert served.generate(plain).token_ids == without


def test_sampled_answers_take_the_files_values(
    served: RunningQuire, folder: Path, tokenizer: tokenizers.Tokenizer
) -> None:
    expected = generated(folder, tokenizer)
    assert [served.generate(request()).token_ids for _ in range(5)] == [expected] * 5
    hot = [tuple(served.generate(request(sampling={"temperature": 9.0, "top_k": 0})).token_ids) for _ in range(3)]
    assert len(set(hot)) > 1, "values of the request win"


def test_http_and_the_command_take_the_files_values(served: RunningQuire, tokenizer: tokenizers.Tokenizer) -> None:
    text = served.generate(request()).text
    with httpx.Client(base_url=served.http_url, timeout=CALL_SECONDS) as http:
        completion = {"prompt": PROMPT, "max_tokens": MAX_TOKENS}
        assert {post(http, "/v1/completions", completion)["choices"][0]["text"] for _ in range(2)} == {text}
        chat = {"messages": [{"role": "user", "content": PROMPT}]}
        answers = [post(http, "/v1/chat/completions", chat) for _ in range(2)]
        assert {one["usage"]["completion_tokens"] for one in answers} == {MAX_TOKENS}
        assert len({one["choices"][0]["message"]["content"] for one in answers}) == 1
        response = post(http, "/v1/responses", {"input": PROMPT})
        assert (response["temperature"], response["usage"]["output_tokens"]) == (0.1, MAX_TOKENS)
        (listed,) = http.get("/v1/models").json()["data"]
    assert listed["default_sampling_params"] == {
        "temperature": 0.1,
        "top_k": 1,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.3,
        "max_tokens": MAX_TOKENS,
    }
    done = quire("generate", "--address", served.addresses["gateway"], "--top-k", "1", PROMPT)
    assert done.stdout.startswith(text)
    assert "the model's defaults: temperature 0.1, repetition_penalty 1.3\n" in done.stderr
    served.output.wait_for("model_defaults=")


def test_a_batch_takes_the_values_unless_they_are_turned_off(
    folder: Path, tmp_path: Path, tokenizer: tokenizers.Tokenizer
) -> None:
    body = {"model": "tiny-llama", "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "requests.jsonl").write_text(json.dumps(line))
    for setting, changes in (("auto", {}), ("none", {"repetition_penalty": 1.0})):
        answers = tmp_path / f"{setting}.jsonl"
        files = ("-i", str(tmp_path / "requests.jsonl"), "-o", str(answers))
        engine = ("--model", str(folder), "--dtype", "float32", "--device-blocks", "64")
        done = quire("run-batch", *files, *engine, "--generation-config", setting)
        assert done.returncode == 0, done.stderr
        choice = json.loads(answers.read_text())["response"]["body"]["choices"][0]
        assert choice["text"] == tokenizer.decode(generated(folder, tokenizer, do_sample=False, **changes))


def test_a_file_with_a_value_out_of_bounds_is_refused_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": -1}')
    done = quire("serve", "--model", str(folder), "--generation-config", str(tmp_path))
    assert done.returncode == 1
    message = "generation_config.json: temperature must be a finite number of at least 0, not -1"
    assert message in done.stderr
    assert "loading" not in done.stderr


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    return http.post(path, json={"model": "tiny-llama", **body}).raise_for_status().json()


def quire(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "services.cli.main", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=START_SECONDS)
