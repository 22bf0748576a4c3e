"""Labels, names and ports in the commands of docs/routers-kubernetes.md are those of the chart."""

import json
import re
import shlex
from itertools import takewhile

import yaml

from services.runtime.ports import ENGINE
from tests.deployment.helm.chart import CHART, ROOT, by_name, helm, merged, nested, only, render, selected_by

POOL = merged(nested("engine.inferencePool.enabled", True), nested("gateway.apiKeys.existingSecret", "keys"))
PAGE = (ROOT / "docs" / "routers-kubernetes.md").read_text()


def command_with(words: str) -> list[str]:
    """Return the words of the only command in a block of the page that contains these."""
    (found,) = [one for one in re.findall(r"```sh\n(.*?)\n```", PAGE, re.DOTALL) if words in one]
    return shlex.split(found.replace("\\\n", " "))


def after(words: list[str], option: str) -> list[str]:
    """Return the words between an option and the next one."""
    return list(takewhile(lambda word: not word.startswith("--"), words[words.index(option) + 1 :]))


def test_the_documented_values_for_smg_start_engines_that_it_may_call() -> None:
    install = command_with("engine.settings.smg=true")
    options = install[install.index("--set") :]
    done = helm("template", "blue", str(CHART), *options)
    assert done.returncode == 0, done.stderr
    policies = by_name(list(yaml.safe_load_all(done.stdout)), "NetworkPolicy")
    assert policies["engine-smg"]["spec"]["ingress"][0]["from"] == [{"podSelector": {"matchLabels": {"app": "smg"}}}]


def test_the_documented_selectors_of_smg_and_of_a_picker_choose_the_engines() -> None:
    smg = command_with("smg launch")
    (picker,) = [word for word in command_with("llm-d-router-gateway") if word.startswith("router.modelServers")]
    of_smg = dict(word.split("=") for word in after(smg, "--selector"))
    of_picker = json.loads(picker.split("=", 1)[1])
    for labels in (of_smg, of_picker):
        assert selected_by(render(POOL), labels) == ["engine"]
    assert after(smg, "--service-discovery-port") == [str(ENGINE.grpc)]
    assert after(smg, "--prometheus-host") == ["127.0.0.1"], "without it, all interfaces"


def test_the_documented_picker_has_the_name_of_the_pool_that_asks_it() -> None:
    install = command_with("llm-d-router-gateway")
    pool = only(render(POOL), "InferencePool")
    assert install[2] == pool["metadata"]["name"]
    assert pool["spec"]["endpointPickerRef"]["name"] == f"{install[2]}-epp"
    assert f"router.epp.flags.model-server-metrics-port={ENGINE.metrics}" in install
