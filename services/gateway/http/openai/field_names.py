"""What the fields of a request are called in HTTP."""

import re
from dataclasses import dataclass, field

# What the gateway calls by another name than HTTP; longer paths first.
_NAMES = {
    "sampling.sample_count": "n",
    "sampling": "",
    "logit_rules": "",
    "beam_search.width": "best_of",
    "beam_search": "use_beam_search",
    "beam_search.length_penalty": "length_penalty",
    "beam_search.early_stopping": "early_stopping",
    "stopping.stop_strings": "stop",
    "stopping.include_stop": "include_stop_str_in_output",
    "stopping": "",
    "output.special_tokens": "skip_special_tokens",
    "output": "",
    "cache.salt": "cache_salt",
    "prompt.text": "prompt",
    "prompt.token_ids.ids": "prompt",
    "prompt.token_ids": "prompt",
    "prompt.chat.tools": "tools",
    "prompt.chat.messages": "messages",
    "prompt.chat": "messages",
    "token_ids": "tokens",
}
_PATH = re.compile(r"(?<![\w.])[a-z_]+(?:\.[a-z_]+)*")


@dataclass(frozen=True)
class FieldNames:
    """What a request's fields are called in HTTP. `own` are those that differ from request to request."""

    own: dict[str, str] = field(default_factory=dict)

    def of(self, path: str) -> str:
        """Return the name for a path of the gateway's, or the path itself where both agree."""
        return _PATH.sub(lambda match: self._name(match[0]), path, count=1)

    def within(self, message: str) -> str:
        """Return a message of the gateway's with its paths in HTTP's names."""
        return _PATH.sub(lambda match: self._name(match[0]) if "." in match[0] else match[0], message)

    def _name(self, path: str) -> str:
        names = _NAMES | self.own
        for known in sorted(names, key=len, reverse=True):
            if path == known and names[known]:
                return names[known]
            if path.startswith(f"{known}."):
                return f"{names[known]}.{path.removeprefix(f'{known}.')}".removeprefix(".")
        return path
