"""Types of numbers in a model's files, and the declaration of a field with its sentence."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

MOST_LAYERS = 1024
MOST_WIDTH = 1 << 24
MOST_TOKENS = 1 << 62

Size = Annotated[int, Field(ge=1, le=MOST_WIDTH)]
"""A dimension of a tensor."""
SizeOrNone = Annotated[int, Field(ge=0, le=MOST_WIDTH)]
"""A dimension of a tensor that a model need not have."""
Sizes = Size | list[Size]
"""A dimension of all layers, or one for each layer."""
Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Layer = Annotated[int, Field(ge=0, le=MOST_LAYERS)]
Heads = Annotated[int, Field(ge=1, le=1 << 16)]
HeadsOfLayers = Heads | list[Heads]
Experts = Annotated[int, Field(ge=0, le=1 << 16)]
Context = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Window = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
Epsilon = Annotated[float, Field(gt=0, le=1)]
RotationBase = Annotated[float, Field(ge=1, le=1e15)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Factor = Annotated[float, Field(gt=0, le=1e9)]
FactorOrZero = Annotated[float, Field(ge=0, le=1e9)]
Multiplier = Annotated[float, Field(ge=-1e9, le=1e9)]
TokenId = Annotated[int, Field(ge=0, lt=MOST_WIDTH)]
TokenIdOrNone = Annotated[int, Field(ge=-1, lt=MOST_WIDTH)]
"""A token, or -1 for none."""
TokenIds = TokenId | list[TokenId]


class FileSchema(BaseModel):
    """Fields of a file. Others are ignored: they are read by nobody here, or checked where they are read."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, populate_by_name=False)


def said(sentence: str, key: str | None = None) -> Any:
    """Declare a field that a file need not have, or may have as null: what it is, and its key if that is no name."""
    return Field(default=None, description=sentence, alias=key)
