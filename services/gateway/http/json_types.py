"""The types of JSON values in request bodies."""

from collections.abc import Callable
from itertools import islice
from typing import Annotated, Any, TypeVar

from pydantic import Field, WrapValidator

T = TypeVar("T")

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
# Validation ends at the first error: a body has room for a million, and each costs microseconds.
Items = Annotated[list[T], Field(fail_fast=True)]
_AT_ONCE = 16


def _in_parts(given: Any, validate: Callable[[Any], Any]) -> Any:
    """Validate the members of an object in parts, and end with the first part that has an error."""
    if not isinstance(given, dict) or len(given) <= _AT_ONCE:
        return validate(given)
    members, valid = iter(given.items()), dict[str, Any]()
    while part := dict(islice(members, _AT_ONCE)):
        valid |= validate(part)
    return valid


Members = Annotated[dict[str, T], WrapValidator(_in_parts)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Schema = dict[str, Any]
