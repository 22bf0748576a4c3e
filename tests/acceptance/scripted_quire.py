"""The services with a scripted engine, for tests of clients."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.running.scripted_engine import scripted_folder
from tests.running_quire import CALL_SECONDS, RunningService

CONVERSATION: dict[str, Any] = json.loads((Path(__file__).parent / "clients" / "conversation.json").read_text())
KEY, SPENT_KEY = "quire-of-tests", "quire-spent"


class ScriptedQuire(NamedTuple):
    """A running gateway: its URL, and the file of the prompts that its engine received."""

    http_url: str
    prompts: Path

    def environment(self) -> dict[str, str]:
        """Return what the clients' checks read."""
        return {"BASE_URL": f"{self.http_url}/v1", "KEY": KEY, "SPENT_KEY": SPENT_KEY, "PROMPTS": str(self.prompts)}


def script() -> list[tuple[str, str]]:
    """Return the script of the conversations, with calls in the form of the template."""
    said = CONVERSATION
    first, *parallel = [_call(one["name"], one["arguments"]) for one in said["calls"]]
    enforced_first, *enforced = [_call(one["name"], one["arguments"]) for one in said["enforced_calls"]]
    thoughts = [f"<think>\n{one}\n</think>\n\n" for one in said["thoughts"]]
    return [
        (said["question"], f"{thoughts[0]}{said['remark']}\n{first}"),
        (said["results"][0], thoughts[1] + "\n".join(parallel)),
        *[(one, said["answer"]) for one in said["results"][1:]],
        (said["enforced_question"], enforced_first),
        (said["enforced_results"][0], "\n".join(enforced)),
        *[(one, _call("final_answer", {"answer": said["answer"]})) for one in said["enforced_results"][1:]],
        (said["object_question"], json.dumps(said["object"], ensure_ascii=False)),
        (said["called_object_question"], _call("Train", said["object"])),
        (said["partial_question"], _call("PartialTrain", said["object"])),
        (said["json_question"], _call("json", said["object"])),
        (said["list_question"], _call("IterableStop", {"tasks": said["object"]["stops"]})),
        (
            said["parallel_question"],
            "\n".join(_call(one["name"].title(), one["arguments"]) for one in said["calls"][1:]),
        ),
        (said["code_question"], said["code"]),
        (said["long_question"], said["long_answer"]),
    ]


def _call(name: str, arguments: dict[str, Any]) -> str:
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


@contextmanager
def scripted_quire(source: Path, folder: Path) -> Iterator[ScriptedQuire]:
    """Run the services with a model's tokenizer. One of the keys has used its tokens."""
    model = scripted_folder(source, folder / CONVERSATION["model"])
    written, prompts, keys = folder / "script.json", folder / "prompts", folder / "keys.toml"
    written.write_text(json.dumps(script()))
    keys.write_text(_keys())
    with ExitStack() as stack:

        def start(label: str, *arguments: str, module: str = "") -> RunningService:
            listen = ("--listen", f"unix:{folder}/{label}.sock")
            return stack.enter_context(closing(RunningService(label, *listen, *arguments, module=module)))

        manager = start("kvmanager").address
        of_engine = ("--kvmanager", manager, "--model", str(model), "--script", str(written), "--prompts", str(prompts))
        engine = start("engine", *of_engine, module="tests.running.scripted_engine").address
        gateway = start("gateway", "--engines", engine, "--http-listen", "127.0.0.1:0", "--api-keys", str(keys))
        gateway.output.wait_for("gateway is ready")
        url = gateway.output.wait_for("gateway listens for HTTP at ").split(" at ")[1]
        _spend(url)
        yield ScriptedQuire(url, prompts)


def _keys() -> str:
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in (KEY, SPENT_KEY)]
    limits = ("", "tokens_per_minute = 1\n")
    entries = zip(("free", "spent"), digests, limits, strict=True)
    return "".join(f'[[key]]\ntenant = "{tenant}"\nsha256 = "{digest}"\n{limit}' for tenant, digest, limit in entries)


def _spend(url: str) -> None:
    """Use up the tokens of a tenant: a full bucket admits one request of any size."""
    body = {"messages": [{"role": "user", "content": CONVERSATION["long_question"]}]}
    headers = {"authorization": f"Bearer {SPENT_KEY}"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=CALL_SECONDS)
    assert answer.status_code == 200, answer.text


if __name__ == "__main__":  # for work on checks: runs until it is interrupted
    import signal
    import sys
    import tempfile

    from services.models.model_store import default_cache, resolve

    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # which stops the services
    demo = resolve("demo", default_cache(), lambda *_: None)
    with tempfile.TemporaryDirectory() as place, scripted_quire(demo, Path(place)) as running:
        sys.stdout.write("".join(f"export {name}={value}\n" for name, value in running.environment().items()))
        sys.stdout.flush()
        signal.pause()
