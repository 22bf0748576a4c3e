"""Breaks of the contract are found, whatever their kind, unless they are deliberate."""

import json
import shutil
from pathlib import Path

import pytest

from protos.compatibility import PROTOS, RELEASED, breaks, check, write_descriptors

# Changes of a file, and the rule that each breaks.
BREAKS = {
    "decoding.proto": [
        ("optional int32 top_k = 2 ", "optional int32 top_k = 22 ", "FIELD_NO_DELETE"),
        ("optional double top_n_sigma = 7 ", "optional float top_n_sigma = 7 ", "FIELD_SAME_TYPE"),
        ("optional double min_p = 4 ", "repeated double min_p = 4 ", "FIELD_SAME_CARDINALITY"),
        ("repeated int32 stop_token_ids = 4 ", "repeated int32 stop_tokens = 4 ", "FIELD_SAME_NAME"),
        (
            "repeated string stop_strings = 3 [",
            'repeated string stop_strings = 3 [json_name = "s", ',
            "FIELD_SAME_JSON_NAME",
        ),
        ("FINISH_REASON_CANCELLED = 3;", "FINISH_REASON_CANCELED = 3;", "ENUM_VALUE_SAME_NAME"),
        ("  FINISH_REASON_FAILED = 4;\n", "", "ENUM_VALUE_NO_DELETE"),
    ],
    "engine.proto": [
        ("rpc GetEngine(GetEngineRequest) returns (GetEngineResponse);\n", "", "RPC_NO_DELETE"),
        ("rpc Admin(EngineAdminRequest)", "rpc Admin(stream EngineAdminRequest)", "RPC_SAME_CLIENT_STREAMING"),
        ("returns (stream GetTokenizerResponse)", "returns (GetTokenizerResponse)", "RPC_SAME_SERVER_STREAMING"),
        ("    Heartbeat heartbeat = 2;\n  }", "  }\n  Heartbeat heartbeat = 2;", "FIELD_SAME_ONEOF"),
    ],
    "gateway.proto": [
        ("service Gateway {", "service Front {", "SERVICE_NO_DELETE"),
        ("reserved 50;\n", "", "RESERVED_MESSAGE_NO_DELETE"),
    ],
    "kvmanager.proto": [
        ("rpc GetPool(GetPoolRequest)", "rpc GetPool(ListPoolsRequest)", "RPC_SAME_REQUEST_TYPE"),
        ("message AuditResponse {", "message AuditReport {", "MESSAGE_NO_DELETE"),
        ("returns (AuditResponse)", "returns (AuditReport)", "RPC_SAME_RESPONSE_TYPE"),
    ],
    "status.proto": [("package quire.v1;", "package quire.v2;", "FILE_SAME_PACKAGE")],
}


@pytest.fixture
def protos(tmp_path: Path) -> Path:
    """A copy of the protos, with a release that promises all that they have."""
    shutil.copytree(PROTOS / "quire", tmp_path / "quire", ignore=shutil.ignore_patterns("*.py", "*.pyi"))
    (tmp_path / "released").mkdir()
    write_descriptors(tmp_path, tmp_path / "released" / "1.0.0.binpb")
    (tmp_path / "released" / "exceptions.toml").touch()
    return tmp_path


def replace(protos: Path, file: str, before: str, after: str) -> None:
    path = protos / "quire" / "v1" / file
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_the_protos_keep_what_releases_promise() -> None:
    assert (RELEASED / "0.1.0.binpb").exists()
    assert check(PROTOS, RELEASED) == []


def test_each_kind_of_break_is_found(protos: Path) -> None:
    release = protos / "released" / "1.0.0.binpb"
    assert breaks(protos, release) == []
    for file, changes in BREAKS.items():
        for before, after, _ in changes:
            replace(protos, file, before, after)
    expected = {rule for changes in BREAKS.values() for *_, rule in changes}
    assert {one.rule for one in breaks(protos, release)} >= expected


def test_new_fields_calls_and_values_break_nothing(protos: Path) -> None:
    replace(protos, "decoding.proto", "optional int32 top_k = 2 ", "int32 new = 100; optional int32 top_k = 2 ")
    replace(protos, "decoding.proto", "FINISH_REASON_FAILED = 4;", "FINISH_REASON_FAILED = 4; FINISH_REASON_NEW = 5;")
    replace(protos, "engine.proto", "service Engine {", "service Engine { rpc New(Cancel) returns (Cancel);")
    assert check(protos, protos / "released") == []


def test_a_deliberate_break_needs_an_exception_with_a_reason_and_the_exception_needs_the_break(protos: Path) -> None:
    exceptions = protos / "released" / "exceptions.toml"
    replace(protos, "decoding.proto", "optional double top_n_sigma = 7 ", "optional float top_n_sigma = 7 ")
    (one,) = breaks(protos, protos / "released" / "1.0.0.binpb")
    assert check(protos, protos / "released") == [str(one)]
    assert str(one).endswith("(FIELD_SAME_TYPE, since 1.0.0)")
    entry = f"[[exception]]\nrelease = '1.0.0'\nrule = '{one.rule}'\nchange = {json.dumps(one.change)}\n"
    exceptions.write_text(entry)
    with pytest.raises(SystemExit, match="has release, rule, change and reason"):
        check(protos, protos / "released")
    exceptions.write_text(entry + "reason = 'nobody used more digits'\n")
    assert check(protos, protos / "released") == []
    replace(protos, "decoding.proto", "optional float top_n_sigma = 7 ", "optional double top_n_sigma = 7 ")
    assert check(protos, protos / "released") == [f"exceptions.toml: this exception does not apply: {one}"]


def test_the_descriptors_of_a_release_are_written_once(protos: Path) -> None:
    with pytest.raises(SystemExit, match=r"1\.0\.0\.binpb exists: a release does not change"):
        write_descriptors(protos, protos / "released" / "1.0.0.binpb")
