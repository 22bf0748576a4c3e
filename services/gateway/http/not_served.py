"""Endpoints of OpenAI's and Anthropic's APIs and of vLLM's server that Quire does not serve.

Each is answered with status 404 and a sentence. Status 501 is more exact, but clients retry every status from 500.
"""

_ASSISTANTS = "Quire has no assistants; use /v1/chat/completions or /v1/responses"
_BATCHES = "Quire runs batches from files, with `quire run-batch`"
_EMBEDDINGS = "Quire computes no embeddings; its models generate text"
_LORA = "Quire serves no LoRA adapters; merge the adapter into its model"
_PROFILES = "Quire has no profiles over HTTP"
_RENDERING = "Quire renders completions and chats only"
_SCORES = "Quire computes no scores of texts; its models generate text"
_SLEEP = "Quire cannot put engines to sleep"
_TEXT_ONLY = "Quire serves no {}; its models read and write text"

# By path; a path also stands for the paths below it.
_REASONS = {
    "/v1/embeddings": _EMBEDDINGS,
    "/v2/embed": _EMBEDDINGS,
    "/pooling": _EMBEDDINGS,
    "/classify": "Quire classifies no texts; its models generate text",
    "/v1/moderations": "Quire has no moderation",
    "/score": _SCORES,
    "/v1/score": _SCORES,
    "/rerank": _SCORES,
    "/v1/rerank": _SCORES,
    "/v2/rerank": _SCORES,
    "/v1/audio": _TEXT_ONLY.format("audio"),
    "/v1/images": _TEXT_ONLY.format("images"),
    "/v1/videos": _TEXT_ONLY.format("videos"),
    "/v1/realtime": "Quire has no Realtime API",
    "/v1/messages/batches": _BATCHES,
    "/v1/responses/render": _RENDERING,
    "/v1/messages/render": _RENDERING,
    "/v1/responses": "Quire does not store responses, because gateways share no state",
    "/v1/responses/compact": "Quire does not compact conversations",
    "/v1/conversations": "Quire does not store conversations, because gateways share no state",
    "/v1/chat/completions": "Quire does not store chat completions, because gateways share no state",
    "/v1/batches": _BATCHES,
    "/v1/files": _BATCHES,
    "/v1/uploads": _BATCHES,
    "/v1/fine_tuning": "Quire does not train models",
    "/v1/evals": "Quire does not evaluate models",
    "/v1/assistants": _ASSISTANTS,
    "/v1/threads": _ASSISTANTS,
    "/v1/vector_stores": "Quire has no vector stores",
    "/v1/containers": "Quire runs no tools, so it has no containers for them",
    "/v1/load_lora_adapter": _LORA,
    "/v1/unload_lora_adapter": _LORA,
    "/sleep": _SLEEP,
    "/wake_up": _SLEEP,
    "/is_sleeping": _SLEEP,
    "/start_profile": _PROFILES,
    "/stop_profile": _PROFILES,
    "/metrics": "Quire has its metrics at another address, set by --metrics-listen",
}
_MOST_PARTS = 4


def reason_of(path: str) -> str | None:
    """Return the reason why a known path is not served, with what to use instead; None for other paths."""
    parts = path.rstrip("/").split("/")[:_MOST_PARTS]
    prefixes = ("/".join(parts[:count]) for count in range(len(parts), 1, -1))
    return next((_REASONS[prefix] for prefix in prefixes if prefix in _REASONS), None)
