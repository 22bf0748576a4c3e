"""What OpenAPI says of the HTTP front holds for whatever schemathesis makes of it."""

import os
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.running_quire import CALL_SECONDS, RunningQuire

# For each operation. `make fuzz-http` takes many more, and others each time.
FUZZ = "QUIRE_FUZZ" in os.environ
EXAMPLES = 1000 if FUZZ else 20
OPERATIONS = [
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/live", "GET"),
    ("/health", "GET"),
    ("/ready", "GET"),
    ("/version", "GET"),
]
# What a sound request may get besides what it asked for: it can be too much, or too late.
EXPECTED = {503, 504}


@pytest.fixture(scope="module")
def api(tiny_quire: RunningQuire) -> Any:
    import schemathesis  # slow to import

    return schemathesis.openapi.from_url(f"{tiny_quire.http_url}/openapi.json")


def test_every_operation_is_tried(http: httpx.Client) -> None:
    described = http.get("/openapi.json").json()["paths"]
    assert {(path, method.upper()) for path, methods in described.items() for method in methods} == set(OPERATIONS)


def test_every_field_and_every_status_is_described(http: httpx.Client) -> None:
    described = http.get("/openapi.json").json()
    for name, schema in described["components"]["schemas"].items():
        assert schema.get("description"), name
        for field, its in schema.get("properties", {}).items():
            assert its.get("description") or "$ref" in its, f"{name}.{field}"
    for path, method in OPERATIONS[:4]:
        statuses = set(described["paths"][path][method.lower()]["responses"])
        assert statuses == {"200", *map(str, (400, 401, 403, 404, 408, 409, 413, 415, 429, 431, 500, 503, 504))}


@pytest.mark.parametrize("sound", [True, False], ids=["sound", "unsound"])
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_request_makes_it_fail_or_answer_what_is_not_described(
    api: Any, path: str, method: str, sound: bool
) -> None:
    from schemathesis import GenerationMode
    from schemathesis.checks import CHECKS

    operation = api[path][method]
    mode = GenerationMode.POSITIVE if sound else GenerationMode.NEGATIVE
    names = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
    checks = [check for check in CHECKS.get_all() if check.__name__ in names]
    assert len(checks) == len(names)

    @settings(
        max_examples=EXAMPLES,
        derandomize=not FUZZ,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def try_one(case: Any) -> None:
        if isinstance(case.body, dict) and path.startswith("/v1/"):
            case.body["max_tokens"] = 2
        response = case.call(timeout=CALL_SECONDS)
        assert response.status_code < 500 or response.status_code in EXPECTED, response.text
        case.validate_response(response, checks=checks)

    if sound or operation.body:  # nothing else can be unsound
        try_one()
