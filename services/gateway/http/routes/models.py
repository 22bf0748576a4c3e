"""The endpoints that describe models, and convert between text and tokens."""

from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from starlette.exceptions import HTTPException

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.http.json_request import ApiRoute
from services.gateway.http.openai import requests, responses
from services.gateway.http.openai.messages import chat
from services.gateway.http.routes.context import HeadRouter, handler_of, json_response, origin_of
from services.gateway.http.routes.descriptions import ERRORS
from services.runtime.errors import InvalidField
from services.wire.field_rules import declared_fields

# As `created` is 0.
_UNKNOWN_TIME = "1970-01-01T00:00:00Z"

router = HeadRouter(route_class=ApiRoute, responses=ERRORS)


@router.get("/v1/models", responses={200: {"model": responses.Models}})
async def list_models(request: Request) -> Response:
    """List the served models."""
    models = [_model(one) for one in handler_of(request).models()]
    ends = {"first_id": models[0]["id"] if models else None, "last_id": models[-1]["id"] if models else None}
    return json_response({"object": "list", "data": models, "has_more": False, **ends})


@router.get("/v1/models/{name:path}", responses={200: {"model": responses.Model}})
async def get_model(name: str, request: Request) -> Response:
    """Describe a served model."""
    if not name:  # elsewhere, no name means the only model
        raise HTTPException(HTTPStatus.NOT_FOUND)
    return json_response(_model(handler_of(request).model(name)))


@router.post("/tokenize", responses={200: {"model": responses.Tokens}})
async def tokenize(body: requests.TokenizeRequest, request: Request) -> Response:
    """Tokenize a prompt or a conversation."""
    handler, model = handler_of(request), body.model or ""
    ids = await handler.token_ids(model, _prompt(body), origin_of(request).caller)
    tokenizer = handler.tokenizer(model)
    before, after = tokenizer.special_tokens_around
    if body.messages is None and body.add_special_tokens is False:
        ids = ids[len(before) : len(ids) - len(after)]
    elif body.messages is not None and body.add_special_tokens:
        ids = [*before, *ids, *after]
    tokens = {
        "count": len(ids),
        "max_model_len": handler.model(model).context_tokens,
        "tokens": ids,
        "token_strs": [tokenizer.entry_of(token) for token in ids] if body.return_token_strs else None,
    }
    return json_response(tokens)


@router.post("/detokenize", responses={200: {"model": responses.Prompt}})
async def detokenize(body: requests.DetokenizeRequest, request: Request) -> Response:
    """Decode token ids to text."""
    translated = gateway_pb2.DetokenizeRequest(model=body.model or "", token_ids=body.tokens, special_tokens=True)
    return json_response({"prompt": await handler_of(request).text(translated)})


def _prompt(body: requests.TokenizeRequest) -> gateway_pb2.Prompt:
    """Translate the prompt or the conversation. Raises InvalidField."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidField("prompt or messages must be set, but not both", "prompt")
    if body.messages is not None:
        return gateway_pb2.Prompt(chat=chat(body.messages, body.tools or [], body))
    for name in ("tools", "continue_final_message", "chat_template_kwargs"):
        if getattr(body, name):
            raise InvalidField(f"{name} requires messages", name)
    return gateway_pb2.Prompt(text=body.prompt or "")


def _model(described: gateway_pb2.GetModelResponse) -> dict[str, Any]:
    return {
        "id": described.model,
        "object": "model",
        "type": "model",
        "display_name": described.model,
        "created_at": _UNKNOWN_TIME,
        "lifecycle": "active",
        "max_input_tokens": described.context_tokens,
        "max_tokens": described.context_tokens,
        "created": 0,
        "owned_by": "quire",
        "root": described.model,
        "parent": None,
        "max_model_len": described.context_tokens,
        "tool_call_parser": described.call_format or None,
        "reasoning_parser": described.thought_format or None,
        "default_sampling_params": _defaults(described.generation_defaults),
    }


def _defaults(of_model: decoding_pb2.GenerationDefaults) -> dict[str, float | None]:
    """Return the effective values: of the model, else of the rules; null without either."""
    given: dict[str, float] = {field.name: value for field, value in of_model.ListFields()}
    return {name: given.get(name, field.default) for name, field in declared_fields(of_model.DESCRIPTOR).items()}
