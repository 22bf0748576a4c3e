"""What happened to the blocks of some requests of a batch, by the events of its own engine."""

from collections.abc import Iterator, Sequence

from kvmanager import Ledger, UnknownRequest
from services.cli.batch.answers import AnswerFile
from services.kvmanager.renderer import summary


def explanations(ledger: Ledger, answers: AnswerFile, custom_ids: Sequence[str]) -> Iterator[str]:
    """Yield a text for each id: the explanation of its request, or of each of its prompts. The engine has stopped."""
    request_ids = answers.request_ids(custom_ids)
    for custom_id in custom_ids:
        if request_id := request_ids.get(custom_id):
            yield from (f"{custom_id}: {text}" for text in _texts(ledger, request_id))
        else:
            yield f"{custom_id}: no request of this batch has been generated for it"


def _texts(ledger: Ledger, request_id: str) -> Iterator[str]:
    try:
        yield summary(ledger.explain(request_id))
    except UnknownRequest as error:
        parts = [*_of_prompts(ledger, request_id)]
        yield from parts or [str(error)]


def _of_prompts(ledger: Ledger, request_id: str) -> Iterator[str]:
    """Yield the explanations of the prompts of a completion, whose requests are numbered."""
    number = 0
    try:
        while True:
            yield f"prompt {number}: {summary(ledger.explain(f'{request_id}-{number}'))}"
            number += 1
    except UnknownRequest:
        return
