"""Maps the gateway's field paths to the field names of the HTTP API."""

import re
from dataclasses import dataclass, field

# Paths whose name in the HTTP API differs.
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
    "prompt.chat.template_variables": "chat_template_kwargs",
    "prompt.chat.add_generation_prompt": "add_generation_prompt",
    "prompt.chat.continue_final_message": "continue_final_message",
    "prompt.chat.messages": "messages",
    "prompt.chat": "messages",
    "token_ids": "tokens",
}
_PATH = re.compile(r"(?<![\w.])[a-z_]+(?:\.[a-z_]+)*")
_NOT_A_WORD = re.compile(r"[._]")


@dataclass(frozen=True)
class FieldNames:
    """The HTTP names of one request's fields. `overrides` are names that depend on the request."""

    overrides: dict[str, str] = field(default_factory=dict)

    def http_name(self, path: str) -> str:
        """Return the HTTP name of a path, or the path itself if both are the same."""
        return _PATH.sub(lambda match: self._name(match[0]), path, count=1)

    def translate(self, message: str) -> str:
        """Replace all paths in a message by their HTTP names. A word alone, such as `output`, is not a path."""
        return _PATH.sub(lambda match: self._name(match[0]) if _NOT_A_WORD.search(match[0]) else match[0], message)

    def _name(self, path: str) -> str:
        names = _NAMES | self.overrides
        for known in sorted(names, key=len, reverse=True):
            if path == known and names[known]:
                return names[known]
            if path.startswith(f"{known}."):
                return f"{names[known]}.{path.removeprefix(f'{known}.')}".removeprefix(".")
        return path
