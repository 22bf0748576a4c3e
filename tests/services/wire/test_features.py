"""What a request needs of its engine."""

from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import Descriptor

from quire.v1 import engine_pb2
from services.wire.features import FEATURES, required_features

FIRST_RELEASE = Path(__file__).parents[3] / "protos" / "released" / "0.1.0.binpb"
# Fields that no gateway sends to an engine, or that an engine may ignore, with the reason.
OTHERS = {"logit_rules.bad_words": "the gateway sends them as tokens, in bad_words"}


def paths(message: Descriptor, former: Descriptor) -> set[str]:
    """The fields of a message, and of those in it, that the former one lacks."""
    found = set()
    for field in message.fields:
        before = former.fields_by_name.get(field.name)
        if before is None:
            found.add(field.name)
        elif field.message_type and before.message_type:
            found |= {f"{field.name}.{path}" for path in paths(field.message_type, before.message_type)}
    return found


def test_each_field_that_engines_of_the_first_release_ignore_is_a_feature_or_may_be_ignored() -> None:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(FIRST_RELEASE.read_bytes()).file:
        pool.Add(file)
    former = pool.FindMessageTypeByName("quire.v1.Submission")
    assert paths(engine_pb2.Submission.DESCRIPTOR, former) == {*FEATURES, *OTHERS}


@pytest.mark.parametrize(
    ("submission", "features"),
    [
        (engine_pb2.Submission(), set()),
        (engine_pb2.Submission(constraint={"regex": "a"}), set()),
        (engine_pb2.Submission(constraint={"tool_calls": {}}), {"constraint.tool_calls"}),
        (engine_pb2.Submission(bad_words=[{"token_ids": [1]}]), {"bad_words"}),
    ],
)
def test_a_request_needs_the_features_of_the_fields_that_it_sets(
    submission: engine_pb2.Submission, features: set[str]
) -> None:
    assert required_features(submission) == features
