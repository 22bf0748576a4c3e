"""Errors below /v1/messages have Anthropic's form, whatever refuses; keys are read from Anthropic's header."""

from typing import Any

import httpx
import pytest

from services.gateway.http.anthropic.error_format import error_body
from services.gateway.http.openai.field_names import FieldNames
from services.runtime.errors import (
    DeadlineExceeded,
    GenerationFailed,
    InvalidField,
    Overloaded,
    PermissionDenied,
    RejectionReason,
    RepeatedEngineLoss,
    RequestExists,
    SlowClient,
    Unavailable,
    UnknownModel,
)
from services.runtime.transport import CLIENT_MESSAGE_BYTES
from tests.services.gateway.http.messages.streams import failure
from tests.services.gateway.http.scripted_server import ScriptedServer

EMPTY = {"role": "user", "content": []}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidField("top_k must be small", "top_k"), 400, "invalid_request_error"),
        (PermissionDenied("no"), 403, "permission_error"),
        (UnknownModel("no"), 404, "not_found_error"),
        (SlowClient("slow"), 408, "timeout_error"),
        (RequestExists("twice"), 409, "invalid_request_error"),
        (Overloaded("full", retry_seconds=3), 529, "overloaded_error"),
        (Overloaded("fast", rejection=RejectionReason.TENANT_REQUESTS), 429, "rate_limit_error"),
        (Overloaded("fast", rejection=RejectionReason.TENANT_TOKENS), 429, "rate_limit_error"),
        (GenerationFailed("failed"), 500, "api_error"),
        (RepeatedEngineLoss("given up"), 500, "api_error"),
        (RuntimeError("secret"), 500, "api_error"),
        (Unavailable("draining"), 503, "overloaded_error"),
        (DeadlineExceeded("late"), 504, "timeout_error"),
    ],
)
def test_each_error_has_a_type_of_anthropic_s(server: ScriptedServer, error: Exception, status: int, kind: str) -> None:
    server.handler.rejection = error
    for body in (ASK, {**ASK, "stream": True}):
        response = server.client.post("/v1/messages", json=body)
        assert failure(response)[:2] == (status, kind)
        assert ("secret" in response.text) is False
        assert ("retry-after" in response.headers) is isinstance(error, Overloaded)
    assert error_body(error, FieldNames(), "msg_x")["error"]["type"] == kind


@pytest.mark.parametrize(
    ("method", "path", "sent", "status", "kind"),
    [
        ("POST", "/v1/messages", {"content": b"{"}, 400, "invalid_request_error"),
        ("POST", "/v1/messages", {"json": []}, 400, "invalid_request_error"),
        ("POST", "/v1/messages/count_tokens", {"json": {}}, 400, "invalid_request_error"),
        ("POST", "/v1/messages", {"content": b"x" * (CLIENT_MESSAGE_BYTES + 1)}, 413, "request_too_large"),
        (
            "POST",
            "/v1/messages",
            {"content": b"x", "headers": {"content-type": "text/plain"}},
            415,
            "invalid_request_error",
        ),
        (
            "POST",
            "/v1/messages",
            {"json": ASK, "headers": {"authorization": "Bearer wrong"}},
            401,
            "authentication_error",
        ),
        ("POST", "/v1/messages", {"json": ASK, "headers": {"x-api-key": "wrong"}}, 401, "authentication_error"),
        ("GET", "/v1/messages", {}, 405, "invalid_request_error"),
        ("GET", "/v1/messages/nothing", {}, 404, "not_found_error"),
        ("POST", "/v1/messages/batches", {"json": {}}, 404, "not_found_error"),
        ("GET", "/v1/messages/batches/b", {}, 404, "not_found_error"),
        ("GET", "/v1/models/x", {"headers": {"anthropic-version": "2023-06-01"}}, 404, "not_found_error"),
        ("POST", "/v1/messages", {"json": {**ASK, "messages": [EMPTY]}}, 400, "invalid_request_error"),
    ],
)
def test_each_refusal_has_the_form_of_anthropic_s(
    server: ScriptedServer, method: str, path: str, sent: dict[str, Any], status: int, kind: str
) -> None:
    headers = {"content-type": "application/json", **sent.pop("headers", {})}
    assert failure(server.client.request(method, path, headers=headers, **sent))[:2] == (status, kind)


def test_batches_are_refused_with_the_reason(server: ScriptedServer) -> None:
    assert "quire run-batch" in failure(server.client.post("/v1/messages/batches", json={}))[2]


def test_other_paths_keep_the_form_of_openai_s(server: ScriptedServer) -> None:
    for path in ("/v1/message", "/v1/messagesx", "/v1/chat/completions"):
        assert server.client.post(path, json={}).json()["error"].keys() == {"message", "type", "param", "code"}


def test_a_client_s_request_id_is_returned_beside_the_own_one(server: ScriptedServer) -> None:
    response = server.client.post("/v1/messages", json=ASK, headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["request-id"] == response.json()["id"]


@pytest.mark.parametrize("version", ["2023-06-01", "", "x" * 1000, "2099-99-99"])
def test_versions_and_betas_have_no_effect(server: ScriptedServer, version: str) -> None:
    headers = {
        "anthropic-version": version,
        "anthropic-beta": "a,b",
        "anthropic-dangerous-direct-browser-access": "true",
    }
    assert server.client.post("/v1/messages?beta=true&x=y", json=ASK, headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_the_key_can_be_in_anthropic_s_header(server: ScriptedServer, path: str) -> None:
    assert server.client.post(path, json=ASK, headers={"x-api-key": "mine"}).status_code == 200
    assert server.client.post(path, json=ASK).status_code == 200
    assert [caller.tenant for caller in server.handler.callers] == ["theirs", ""]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("x-api-key", "mine"), ("authorization", "Bearer mine")], 200),
        ([("x-api-key", ""), ("authorization", "Bearer mine")], 200),
        ([("x-api-key", "mine"), ("authorization", "Bearer")], 200),
        ([("x-api-key", "mine"), ("authorization", "Basic wrong")], 200),
        ([("x-api-key", "mine"), ("authorization", "Bearer wrong")], 401),
        ([("x-api-key", "wrong"), ("authorization", "Bearer mine")], 401),
        ([("x-api-key", "humble"), ("authorization", "Bearer mine")], 401),
        ([("x-api-key", "mine"), ("authorization", "Bearer mine"), ("authorization", "Bearer mine")], 401),
        ([("x-api-key", "mine"), ("x-api-key", "mine"), ("authorization", "Bearer mine")], 401),
    ],
)
def test_two_keys_must_be_of_one_caller(server: ScriptedServer, headers: list[tuple[str, str]], status: int) -> None:
    response = server.client.post("/v1/messages", json=ASK, headers=httpx.Headers(headers))
    assert response.status_code == status


def test_models_are_listed_for_clients_of_both_apis(server: ScriptedServer) -> None:
    listed = server.client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    (model,) = listed["data"]
    assert (listed["object"], listed["has_more"]) == ("list", False)
    assert listed["first_id"] == listed["last_id"] == model["id"] == "played"
    assert (model["object"], model["type"], model["display_name"]) == ("model", "model", "played")
    assert model["created_at"] == "1970-01-01T00:00:00Z"
    assert server.client.get("/v1/models/played").json() == model


def test_a_thread_is_refused_with_the_details_by_which_the_client_goes_on_without(server: ScriptedServer) -> None:
    answer = server.client.post("/v1/messages", json={**ASK, "thread": {"type": "create"}})
    assert answer.status_code == 400
    expected = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert answer.json()["error"]["details"] == expected
    assert "details" not in server.client.post("/v1/messages", json={**ASK, "container": "x"}).json()["error"]
