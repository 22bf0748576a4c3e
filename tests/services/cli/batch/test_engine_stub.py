"""Tokens of requests are held until their end, or for a while."""

from quire.v1 import engine_pb2 as pb
from services.cli.batch.engine_stub import HeldTokens


def tokens(request_id: str, *token_ids: int, sample: int = 0) -> pb.SampleTokens:
    return pb.SampleTokens(request_id=request_id, attempt=1, sample=sample, token_ids=token_ids)


def exchanged(held: HeldTokens, now: float, step: pb.StepOutput) -> list[tuple[str, int, list[int]]]:
    held.exchange(step, now)
    return [(one.request_id, one.sample, list(one.token_ids)) for one in step.tokens]


def test_an_end_brings_all_tokens_of_its_request_in_one_message_for_each_sample() -> None:
    held = HeldTokens()
    held.exchange(pb.StepOutput(), 10.0)
    first = pb.StepOutput(tokens=[tokens("a", 1), tokens("b", 2), tokens("a", 3), tokens("a", 4, sample=1)])
    assert exchanged(held, 10.1, first) == []
    last = tokens("a", 5)
    last.end.stop_token_id = 5
    step = pb.StepOutput(tokens=[last, tokens("b", 6)], finished=[pb.RequestFinished(request_id="a")])
    assert exchanged(held, 10.2, step) == [("a", 0, [1, 3, 5]), ("a", 1, [4])]
    assert step.tokens[0].end.stop_token_id == 5
    assert [end.request_id for end in step.finished] == ["a"]
    assert exchanged(held, 10.3, pb.StepOutput()) == []


def test_after_a_while_all_tokens_are_delivered_so_that_stop_strings_are_found() -> None:
    held = HeldTokens()
    held.exchange(pb.StepOutput(), 10.0)
    assert exchanged(held, 10.4, pb.StepOutput(tokens=[tokens("a", 1)])) == []
    assert exchanged(held, 10.6, pb.StepOutput(tokens=[tokens("a", 2), tokens("b", 3)])) == [
        ("a", 0, [1, 2]),
        ("b", 0, [3]),
    ]
    assert exchanged(held, 10.7, pb.StepOutput(tokens=[tokens("a", 4)])) == []
