"""The sandbox's operations as JSON."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, TypeAdapter

_MAX_TOKENS = 100_000  # more than the sandbox's own limit, so that its message is shown
_MAX_TEXT = 4000

Tokens = Annotated[StrictInt, Field(ge=1, le=_MAX_TOKENS)]
SequenceId = Annotated[StrictInt, Field(ge=1, le=(1 << 31) - 1)]


class _Operation(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NewOperation(_Operation):
    """Begins a sequence with `tokens` tokens, or with a text that has a token for each word.

    `final` is its final length in tokens, which contiguous reservation uses.
    """

    operation: Literal["new"]
    tokens: Tokens | None = None
    text: Annotated[str, Field(max_length=_MAX_TEXT)] = ""
    final: Tokens | None = None


class AppendOperation(_Operation):
    """Appends tokens to a sequence."""

    operation: Literal["append"]
    sequence: SequenceId
    tokens: Tokens = 1


class ForkOperation(_Operation):
    """Forks a sequence."""

    operation: Literal["fork"]
    sequence: SequenceId


class WriteOperation(_Operation):
    """Rewrites the last token of a sequence."""

    operation: Literal["write"]
    sequence: SequenceId


class FreeOperation(_Operation):
    """Frees a sequence."""

    operation: Literal["free"]
    sequence: SequenceId


class BeamOperation(_Operation):
    """Runs the next step of the beam search example."""

    operation: Literal["beam"]


Operation = NewOperation | AppendOperation | ForkOperation | WriteOperation | FreeOperation | BeamOperation


class NewSandbox(_Operation):
    """The properties of a new sandbox."""

    block_size: Literal[4, 16] = 16


OPERATION: TypeAdapter[Operation] = TypeAdapter(Annotated[Operation, Field(discriminator="operation")])
NEW_SANDBOX: TypeAdapter[NewSandbox] = TypeAdapter(NewSandbox)
