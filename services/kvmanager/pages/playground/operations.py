"""What a person can do in the sandbox, as JSON says it."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, TypeAdapter

_MOST_TOKENS = 100_000  # more than any sandbox has room for, so that its own refusal is seen
_MOST_TEXT = 4000

Tokens = Annotated[StrictInt, Field(ge=1, le=_MOST_TOKENS)]
SequenceId = Annotated[StrictInt, Field(ge=1, le=(1 << 31) - 1)]


class _Operation(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NewOperation(_Operation):
    """A sequence begins with so many tokens, or with a text, a token for each word.

    `final` is how many tokens it will have in the end, which only contiguous reservation wants to know.
    """

    operation: Literal["new"]
    tokens: Tokens | None = None
    text: Annotated[str, Field(max_length=_MOST_TEXT)] = ""
    final: Tokens | None = None


class AppendOperation(_Operation):
    """A sequence goes on by so many tokens."""

    operation: Literal["append"]
    sequence: SequenceId
    tokens: Tokens = 1


class ForkOperation(_Operation):
    """Another sequence begins with all that a sequence has."""

    operation: Literal["fork"]
    sequence: SequenceId


class WriteOperation(_Operation):
    """The last token of a sequence is written anew."""

    operation: Literal["write"]
    sequence: SequenceId


class FreeOperation(_Operation):
    """A sequence gives its blocks back."""

    operation: Literal["free"]
    sequence: SequenceId


class BeamOperation(_Operation):
    """The next step of the example of a beam search."""

    operation: Literal["beam"]


Operation = NewOperation | AppendOperation | ForkOperation | WriteOperation | FreeOperation | BeamOperation


class NewSandbox(_Operation):
    """What a sandbox is made with."""

    block_size: Literal[4, 16] = 16


OPERATION: TypeAdapter[Operation] = TypeAdapter(Annotated[Operation, Field(discriminator="operation")])
NEW_SANDBOX: TypeAdapter[NewSandbox] = TypeAdapter(NewSandbox)
