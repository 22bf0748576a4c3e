import json
import os
import subprocess

import pytest

from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, RunningQuire
from tests.services.gateway.http.clients.node_client import SCRIPT, NoNodeClient, node_path


def test_output_of_the_node_client_equals_that_of_grpc(tiny_quire: RunningQuire) -> None:
    try:
        environment = os.environ | {"BASE_URL": f"{tiny_quire.http_url}/v1", "NODE_PATH": node_path()}
    except NoNodeClient as reason:
        pytest.skip(str(reason))
    done = subprocess.run(
        ["node", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False, timeout=CALL_SECONDS
    )
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    own = tiny_quire.generate(prompt_request("The quick brown fox", 12, seed=5, ignore_eos=False)).text
    assert output["completion"] == output["completionStream"] == own
    assert output["chat"] == output["chatStream"] == output["response"] == output["responseStream"]
    assert output["models"] == ["tiny-llama"]
    assert isinstance(json.loads(output["json"])["on"], bool)
    assert output["call"]["name"] == "turn"
    assert isinstance(json.loads(output["call"]["arguments"])["on"], bool)
    assert output["error"] == [404, "model_not_found"]
