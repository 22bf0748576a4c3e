"""The official Node client, unchanged; fetched once, into the cache."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from services.model_store import default_cache
from tests.load import prompt_request
from tests.running_quire import RunningQuire

SCRIPT = Path(__file__).parent / "node" / "client.cjs"
PACKAGE = Path(__file__).parent / "node" / "package.json"


def node_path() -> str:
    """Return where the client is installed, with the version that package.json pins."""
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("node is not installed: the Node client is not tried")
    version = json.loads(PACKAGE.read_text())["dependencies"]["openai"]
    folder = default_cache().parent / "npm-clients" / f"openai-{version}"
    if not (folder / "node_modules" / "openai").exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE, folder)
        install = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
        done = subprocess.run(install, cwd=folder, capture_output=True, text=True, check=False, timeout=100)
        if done.returncode:
            pytest.skip(f"npm cannot install the Node client: {done.stderr.strip().splitlines()[:1]}")
    return str(folder / "node_modules")


def test_the_node_client_gets_what_grpc_generates(tiny_quire: RunningQuire) -> None:
    environment = os.environ | {"BASE_URL": f"{tiny_quire.http_url}/v1", "NODE_PATH": node_path()}
    done = subprocess.run(
        ["node", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    own = tiny_quire.generate(prompt_request("The quick brown fox", 12, seed=5, ignore_eos=False)).text
    assert told["completion"] == told["completionStream"] == own
    assert told["chat"] == told["chatStream"] == told["several"][0]
    assert told["stopped"] == told["chat"][: told["chat"].index(told["chat"][4])]
    assert told["models"] == ["tiny-llama"]
    assert set(told["logprobs"]) == {2}
    assert isinstance(json.loads(told["json"])["on"], bool)
    assert told["call"]["name"] == "turn"
    assert isinstance(json.loads(told["call"]["arguments"])["on"], bool)
    assert told["error"] == [404, "model_not_found"]
