"""The cases of the sweep: each causal model type of the installed transformers as published, and its variants."""

from collections.abc import Collection, Iterable
from copy import deepcopy
from dataclasses import fields
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.model_types.sizes import SIZES, Fields, Table
from tests.model_types.tables.dense import DENSE
from tests.model_types.tables.experts import EXPERTS
from tests.model_types.tables.hybrid import HYBRID
from tests.model_types.tables.latent import LATENT
from tests.model_types.tables.older import OLDER
from tests.model_types.tables.windows import WINDOWS

TABLE: Table = {**DENSE, **WINDOWS, **EXPERTS, **LATENT, **HYBRID, **OLDER}


class Case(NamedTuple):
    """A configuration of a model type; `given` are the fields that are not plain sizes."""

    model_type: str
    variant: str
    given: Fields

    @property
    def name(self) -> str:
        return f"{self.model_type}: {self.variant}" if self.variant else self.model_type


def causal_types() -> list[str]:
    """Return the causal model types of the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def cases(model_types: Collection[str] = ()) -> list[Case]:
    """Return the cases of some types or all. A type that the table lacks has one case of plain sizes."""
    chosen: Iterable[str] = model_types or causal_types()
    return [Case(one, variant, given) for one in chosen for variant, given in TABLE.get(one, {"": {}}).items()]


def case_named(name: str) -> Case:
    """Return the case of a name. Raises KeyError if the table lacks it."""
    model_type, _, variant = name.partition(": ")
    return Case(model_type, variant, TABLE[model_type][variant])


def configuration(case: Case) -> Any:
    """Return transformers' configuration of a case; what its class refuses raises anything."""
    return CONFIG_MAPPING[case.model_type](**_sized(case.model_type, case.given))


def _sized(model_type: str, given: Fields) -> Fields:
    kind = CONFIG_MAPPING[model_type]
    own = {field.name for field in fields(kind)}
    other_names = {name for name, field in kind.attribute_map.items() if field not in SIZES.keys() | given.keys()}
    sized = {name: size for name, size in SIZES.items() if name in own | other_names} | deepcopy(given)
    text = sized.get("text_config")
    return sized | {"text_config": _sized(text["model_type"], text)} if text else sized
