"""Creates the client of a target."""

from collections.abc import Callable

from services.loadgen.clients.target import Client, Target
from services.loadgen.workload.prompts import PromptMaker

# Assumed for servers that do not report theirs: hardly any model has fewer.
DEFAULT_VOCABULARY = 32_000


def open_client(target: Target, clock: Callable[[], float]) -> Client:
    """Create the client inside a running event loop."""
    prompts = PromptMaker(target.prompt_seed, target.vocabulary_size or DEFAULT_VOCABULARY)
    if target.kind == "grpc":
        from services.loadgen.clients.grpc_client import GrpcClient

        return GrpcClient(target, prompts, clock)
    from services.loadgen.clients.openai_client import OpenAIClient

    return OpenAIClient(target, prompts, clock)
