"""The official Node client, unchanged; fetched once, into the cache."""

import json
import os
import subprocess

import pytest

from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, RunningQuire
from tests.services.gateway.http.clients.node_client import SCRIPT, NoNodeClient, node_path


def test_the_node_client_gets_what_grpc_generates(tiny_quire: RunningQuire) -> None:
    try:
        environment = os.environ | {"BASE_URL": f"{tiny_quire.http_url}/v1", "NODE_PATH": node_path()}
    except NoNodeClient as reason:
        pytest.skip(str(reason))
    done = subprocess.run(
        ["node", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False, timeout=CALL_SECONDS
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
