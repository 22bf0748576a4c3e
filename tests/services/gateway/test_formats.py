"""Engines of one model with other weights, or with another type of KV cache."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, aclosing
from pathlib import Path

import pytest

from tests.load import prompt_request
from tests.running.forwarder import Forwarder
from tests.services.gateway.handler_in_process import ACME, handler_in_process

TOKENS = 400


@pytest.mark.parametrize(
    ("fingerprints", "moves"), [(("plain", "plain"), True), (("plain", "plain-kv-int8"), False)], ids=["same", "other"]
)
def test_a_request_that_has_begun_continues_on_engines_of_its_fingerprint_only(
    tiny_model: Callable[[str], Path], tmp_path: Path, fingerprints: tuple[str, str], moves: bool
) -> None:
    """The link breaks and comes back: another engine takes the request at once, or the same one takes it again."""

    async def run(forwarders: dict[str, Forwarder]) -> None:
        places = tuple(forwarder.address for forwarder in forwarders.values())
        options = {"through": places, "seconds_per_token": 1e-3, "fingerprints": fingerprints}
        async with handler_in_process(tmp_path, tiny_model("llama"), **options) as one:  # type: ignore[arg-type]
            began_at = ""
            async with aclosing(one.handler.generate(prompt_request("On", TOKENS), ACME)) as responses:
                async for response in responses:
                    if response.HasField("delta") and not began_at and one.events.progress:
                        began_at = one.events.progress.engine_id
                        forwarders[began_at].cut()
            progress = one.events.progress
            assert progress is not None
            assert one.events.names[-1] == "ended"
            assert progress.failovers == 1
            assert progress.generated_tokens == TOKENS
            assert (progress.engine_id != began_at) is moves

    with ExitStack() as stack:
        forwarders = {name: Forwarder(tmp_path / f"{name}.sock") for name in ("one", "two")}
        for forwarder in forwarders.values():
            stack.callback(forwarder.close)
        asyncio.run(run(forwarders))
