"""What a declaration of a dialect consists of."""

from dataclasses import dataclass

from services.gateway.dialects.forms.call_form import CallForm, CallTarget, WrittenCall
from services.gateway.dialects.scanner import Reading


@dataclass(frozen=True)
class ThoughtFormat:
    """The marks around a thought. A prompt may have the first one already, and a call may follow without the last one.

    `frames` are marks around the answer, which is passed on without them. `aliases` are vLLM's names of the format.
    """

    name: str
    start: str
    end: str
    aliases: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallFormat:
    """How calls are written: sections of calls, each between an opening and a closing mark.

    Without an opening, an answer consists of calls or of text, but may begin with one of `prefixes`. Without a closing
    mark, a section ends with its last call. One section has several calls if it `repeats`, with `separators` and
    whitespace between them, and `separator` where Quire writes them. `more_openings` and `more_forms` are read and
    never written. `inner` is written within both marks, around the calls of a section. Calls that are written `alone`
    have a section each, and an answer has at most one `single` call.
    """

    name: str
    form: CallForm
    opening: str = ""
    closing: str = ""
    aliases: tuple[str, ...] = ()
    repeats: bool = False
    separators: str = ""
    separator: str = "\n"
    inner: tuple[str, str] = ("", "")
    more_openings: tuple[str, ...] = ()
    more_forms: tuple[CallForm, ...] = ()
    prefixes: tuple[str, ...] = ()
    alone: bool = False
    single: bool = False

    @property
    def openings(self) -> tuple[str, ...]:
        """All opening marks."""
        return (self.opening, *self.more_openings) if self.opening else ()

    def read(self, target: CallTarget) -> Reading[bool]:
        """Read one call in any of the forms. Return False, and read nothing, if there is none."""
        start = target.scan.at
        for form in (self.form, *self.more_forms):
            if (yield from form.read(target)):
                return True
            target.scan.at = start
        return False

    def section(self, calls: list[str]) -> str:
        """Return written calls with the marks around them."""
        before, after = self.inner
        if self.repeats and not self.alone:
            return f"{self.opening}{before}{self.separator.join(calls)}{after}{self.closing}"
        return self.separator.join(f"{self.opening}{before}{call}{after}{self.closing}" for call in calls)


@dataclass(frozen=True)
class Channels:
    """Messages with a header, which has the channel of a message and its recipient, as in OpenAI's harmony.

    `start` or `channel` begin a header, `message` ends it, and one of `ends` ends the message. Messages to `recipient`
    and the name of a tool are calls, others on the channel `thought` are thoughts.
    """

    start: str
    channel: str
    message: str
    ends: tuple[str, ...]
    recipient: str
    thought: str

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that a template with channels has."""
        return (self.start, self.channel, self.message, self.recipient)


@dataclass(frozen=True)
class Dialect:
    """How a model thinks and calls tools. A part that it lacks is None, and its marks are text."""

    thought: ThoughtFormat | None = None
    calls: CallFormat | None = None
    channels: Channels | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that structure an output."""
        thought, calls = self.thought, self.calls
        of_thought = (thought.start, thought.end, *thought.frames) if thought else ()
        of_calls = (
            (*calls.openings, calls.closing, *calls.prefixes, calls.form.written(WrittenCall("f", "{}")))
            if calls
            else ()
        )
        return tuple(filter(None, (*of_thought, *of_calls)))

    @property
    def name(self) -> str:
        """The names of its parts, such as `think+hermes`; `plain` without any."""
        names = dict.fromkeys(part.name for part in (self.thought, self.calls) if part is not None)
        return "+".join(names) or "plain"
