"""The base of all request bodies: strict types, and members that have no effect dropped."""

from functools import cache
from itertools import islice
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from services.gateway.http.member_policy import ANYWHERE

_MOST_UNKNOWN = 16


class StrictBody(BaseModel):
    """Strict types: strings and numbers are not converted to each other. Unknown fields are errors, but only a few.

    Members without effect (member_policy) and unknown ones that are null count as absent.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_unused_members(cls, given: Any) -> Any:
        """Drop members, and keep the first unknown fields: the error names one, and a body has room for a million."""
        if not isinstance(given, dict) or given.keys() <= (known := _names_of(cls)):
            return given
        unknown = (name for name in given if name not in known and not _says_nothing(name, given[name]))
        return {name: given[name] for name in [*filter(known.__contains__, given), *islice(unknown, _MOST_UNKNOWN)]}


@cache
def _names_of(schema: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in schema.model_fields.items())


def _says_nothing(name: str, value: Any) -> bool:
    return value is None or name in ANYWHERE
