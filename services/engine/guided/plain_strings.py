"""Expressions of strings without quotes, which end with a mark, for llguidance's grammars.

Where a length is bounded, nothing is subtracted from an expression: llguidance would follow each length in each place
of the mark. A text then ends at its first mark, and so cannot have it, if any beginning of it is a string, too;
otherwise parts of it do without the first character of the mark.
"""

import json
import re
from collections.abc import Callable, Sequence

from services.engine.guided.schemas.string_texts import FREE, StringSet, regex

# Words that are values, and letters that may stand in front of a string's quotes, in JSON or Python.
_WORDS = ("true", "false", "null", "True", "False", "None")
_PREFIXES = "bBrRuUfF"
_BEGIN_VALUES = r"\s\-+.0-9\"'\[{(#\\"
_LIKE_VALUES = (
    rf"(?s:\s*(?:[-+.0-9\"'\[{{(#\\]|[{_PREFIXES}]{{1,2}}[\"']).*)",
    rf"(?s:\s*(?:{'|'.join(_WORDS)})(?:[^A-Za-z_].*)?)",
)


class PlainStrings:
    """Writes expressions of strings that `mark` ends.

    `unlike_values`: they must not look like other values in JSON or Python. `has_fault` compiles an expression, and
    returns whether it fails or matches nothing.
    """

    def __init__(self, mark: str, has_fault: Callable[[str], bool], *, unlike_values: bool) -> None:
        self._mark = mark
        self._has_fault = has_fault
        self._unlike_values = unlike_values
        self._first, self._second = re.escape(mark[:1]), re.escape(mark[1:2])

    def of(self, sets: Sequence[StringSet]) -> str:
        """Return the expression of strings that are in one of the sets; empty if there are none."""
        found = dict.fromkeys(filter(None, map(self._of_set, sets)))
        return " | ".join(f"({one})" for one in found)

    def _of_set(self, one: StringSet) -> str:
        if one.literals is not None:
            return self._of_literals(one)
        if one.patterns:
            return self._of_patterns(one)
        return self._of_length(one.least, one.most)

    def _of_literals(self, one: StringSet) -> str:
        texts = [text for text in one.literals or () if one.has_length(len(text)) and self._can_be(text)]
        literals = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        if not literals or not one.patterns:
            return literals
        expression = " & ".join([f"({literals})", *map(self._bounded, one.patterns)])
        return "" if self._has_fault(expression) else expression

    def _can_be(self, text: str) -> bool:
        looks_like_value = self._unlike_values and any(re.fullmatch(like, text) for like in _LIKE_VALUES)
        return self._mark not in text and not looks_like_value

    def _of_patterns(self, one: StringSet) -> str:
        parts = list(map(self._bounded, one.patterns))
        has_length = one.least or one.most is not None
        if has_length:
            parts.append(regex(f"(?s:.{{{one.least},{'' if one.most is None else one.most}}})"))
        if self._unlike_values:
            parts += [f"~{regex(like)}" for like in _LIKE_VALUES]
        expression = " & ".join(parts)
        if not self._has_fault(f"{expression} & {regex(f'(?s:.*{self._first}.*)')}"):
            excluded = regex(f"(?s:[^{self._first}]*)") if has_length else f"~{self._with_mark}"
            expression = f"{expression} & {excluded}"
        return "" if self._has_fault(expression) else expression

    def _bounded(self, pattern: str) -> str:
        return regex(pattern.replace(FREE, f"(?s:[^{self._first}]*)"))

    @property
    def _with_mark(self) -> str:
        return regex(f"(?s:.*{re.escape(self._mark)}.*)")

    def _of_length(self, least: int, most: int | None) -> str:
        if not self._unlike_values:
            return self._any_of_length(least, most)
        if least < 2:
            empty = [""] if not least else []
            return regex(f"(?s:{'|'.join([*empty, *self._not_values('', most, least)])})")
        return " & ".join([self._any_of_length(least, most), *(f"~{regex(like)}" for like in _LIKE_VALUES)])

    def _any_of_length(self, least: int, most: int | None) -> str:
        if not least:
            return regex(f"(?s:{_rest(most)})") if most is not None else f"{regex('(?s:.*)')} & ~{self._with_mark}"
        if least > 1 or not self._second:
            return regex(f"(?s:[^{self._first}]{{{least}}}{_rest(most, least)})")
        cases = [f"[^{self._first}]{_rest(most, 1)}"]
        if most is None or most > 1:
            cases.append(f"{self._first}[^{self._second}]{_rest(most, 2)}")
        return regex(f"(?s:{'|'.join(cases)})")

    def _not_values(self, begun: str, most: int | None, least: int = 0) -> list[str]:
        """Return patterns of texts behind `begun`, which begins words, that do not make a value of them."""
        if most is not None and len(begun) >= most:
            return []
        following = sorted({word[len(begun)] for word in _WORDS if word.startswith(begun) and word != begun})
        if begun in _WORDS:
            return [f"[A-Za-z_]{_rest(most, len(begun) + 1)}"]
        letters = [*following, *(_PREFIXES if len(begun) < 2 and all(one in _PREFIXES for one in begun) else "")]
        closed = f"\"'{_BEGIN_VALUES if not begun else ''}{self._first if least else ''}"
        other = f"[^{closed}{''.join(dict.fromkeys(letters))}]{_rest(most, len(begun) + 1)}"
        cases = [other]
        for letter in dict.fromkeys(letters):
            ends = [] if begun + letter in _WORDS else [""]
            behind = [*ends, *self._not_values(begun + letter, most)]
            cases += [f"{letter}(?:{'|'.join(behind)})"] if behind else []
        return cases


def _rest(most: int | None, taken: int = 0) -> str:
    """Return the pattern of any text that is left of a length."""
    return ".*" if most is None else f".{{0,{max(0, most - taken)}}}"
