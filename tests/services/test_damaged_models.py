"""Damaged models on the running program: the start fails in one line with the reason, and nothing waits."""

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from engine.errors import ModelUnsupported
from services.cli.main import cli
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import assemble
from services.runtime.logs.records import message_of
from tests.engine.native_kernels import FOLDER as KERNELS
from tests.running_quire import START_SECONDS, Output, launch
from tests.sound_folder import write_sound_folder

Tiny = Callable[[str], Path]

# JSON of the right form, which the library refuses.
UNKNOWN_MERGE = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}}


def result(process: "subprocess.Popen[str]") -> tuple[int, list[str]]:
    output, _ = process.communicate(timeout=START_SECONDS)
    return process.returncode, output.splitlines()


@pytest.fixture
def copy(tiny_model: Tiny, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model("llama"), tmp_path / "tiny")


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"rope_theta": float("nan")}, "config.json: rope_theta must be a finite number, not NaN"),
        ({"rms_norm_eps": 1}, "config.json: rms_norm_eps must be a number with a decimal point, such as 1.0, not 1"),
        ({"use_cache": None}, "config.json: use_cache must be true or false, not null"),
        ({"hidden_act": "x"}, "config.json: hidden_act must be one of gelu, "),
        ({"num_hidden_layers": 10**9}, "config.json: num_hidden_layers must be at most 1024, not 1000000000"),
        (
            {"quantization_config": {"quant_method": "hqq", "bits": 4}},
            "config.json: its weights are quantized (hqq, 4 bits), which is not served",
        ),
    ],
)
def test_serve_refuses_a_damaged_model_in_one_line_and_starts_nothing(
    changed: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    folder = write_sound_folder(tmp_path / "model", **changed)
    status, lines = result(launch("serve", "--listen", "127.0.0.1:0", "--model", str(folder)))
    assert (status, len(lines)) == (1, 1)
    assert lines[0].startswith(f"serve     | ERROR {folder} cannot be used: {fault}")


def test_an_engine_and_a_plan_refuse_it_too(tmp_path: Path) -> None:
    folder = write_sound_folder(tmp_path / "model", rms_norm_eps=0)
    fault = f"{folder} cannot be used: config.json: rms_norm_eps must be above 0, not 0"
    status, lines = result(launch("engine", "--listen", f"unix:{tmp_path}/engine.sock", "--model", str(folder)))
    assert status == 1
    assert message_of(lines[-1]).startswith(f"engine failed: {fault}")
    planned = CliRunner().invoke(cli, ["plan", "--model", str(folder), "--device-blocks", "10"])
    assert planned.exit_code == 2
    assert fault in " ".join(planned.output.split())


def test_a_tokenizer_that_only_its_library_refuses_ends_serve_with_the_reason(copy: Path) -> None:
    (copy / "tokenizer.json").write_text(json.dumps(UNKNOWN_MERGE))
    status, lines = result(launch("serve", "--listen", "127.0.0.1:0", "--model", str(copy)))
    assert status == 1
    assert "engine failed: tiny: tokenizer.json: model or added_tokens cannot be read: " in lines[-1]
    assert not [line for line in lines if "Traceback" in line]


@pytest.mark.parametrize("attention", ["torch", "auto"])
def test_a_model_whose_logits_are_not_finite_does_not_start(copy: Path, attention: str) -> None:
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"].fill_(3e38)
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    settings = EngineSettings(
        model=str(copy), attention_backend=attention, device_blocks=8, threads=1, kernels_folder=str(KERNELS)
    )
    threads = torch.get_num_threads()
    try:
        with pytest.raises(ModelUnsupported, match=r"^tiny: its logits are not finite at \d+ of 24 tokens in "):
            assemble(settings)
    finally:
        torch.set_num_threads(threads)


def test_a_signal_ends_an_engine_that_loads_its_model(copy: Path, tmp_path: Path) -> None:
    options = ("--listen", f"unix:{tmp_path}/engine.sock", "--model", str(copy))
    process = launch("engine", *options, module="tests.running.loading_engine")
    output = Output(process)
    output.wait_for("engine listens on")
    process.send_signal(signal.SIGTERM)
    assert process.wait(START_SECONDS) == 0
    output.finish()
    assert "engine was stopped before its model was loaded" in output.lines[-1]
