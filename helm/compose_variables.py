"""The variables of settings that docker compose passes to a service, if they are set."""

import dataclasses
from typing import Any

from chart_schema import OF_EVENTS, OF_THE_CHART

# The image sets these: docker-compose 1.29 would remove them from a container where nothing else does.
_OF_THE_IMAGE = {"log_format"}
_HEAD = """\
# Settings of {article} {service} that docker compose passes on where the shell or .env sets them: a name without a
# value takes it from there. Generated: run make chart. `quire {service} --help` explains them.
"""


def variables_of(service: str, settings_type: type[Any]) -> str:
    """Return the text of a file for `env_file`, without what the image and docker-compose.yml set."""
    names = [
        one.name
        for one in dataclasses.fields(settings_type)
        if one.name not in OF_THE_CHART - OF_EVENTS | _OF_THE_IMAGE
    ]
    head = _HEAD.format(article="an" if service == "engine" else "a", service=service)
    return head + "".join(f"QUIRE_{service.upper()}_{name.upper()}\n" for name in names)
