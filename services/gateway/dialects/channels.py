"""Reads messages on channels, as OpenAI's harmony has them."""

import re

from services.gateway.dialects.dialect import Channels
from services.gateway.dialects.events import CallStart, Event, Reasoning, Text
from services.gateway.dialects.forms.call_form import NO_ARGUMENTS, CallTarget
from services.gateway.dialects.forms.json_text import stream_object
from services.gateway.dialects.scanner import Markers, Reading

_TO = "to="


class ChannelReader:
    """Reads an output that begins behind the start of a message, or in the middle of one."""

    def __init__(self, channels: Channels, target: CallTarget, *, drops_text: bool) -> None:
        """`drops_text`: the target takes no text, so that none may pass it."""
        self._drops_text = drops_text
        self._channels = channels
        self._target = target
        self._scan = target.scan
        self._unfinished = ""  # a header that does not end
        self._last: type[Event] | None = None  # what the message before has
        self._between = Markers.of((channels.start, channels.channel, *channels.ends))
        self._recipient = re.compile(rf"\bto={re.escape(channels.recipient)}([^\s<]+)")

    def read(self) -> Reading[None]:
        """Read the whole output."""
        marker = yield from self._first()
        while marker:
            if marker in self._channels.ends:
                marker = (yield from self._scan.until(self._between, lambda _: None)).marker
                continue
            header = yield from self._header(marker)
            if header is None:
                self._target.emit(Text(self._unfinished))
                return
            marker = yield from self._message(header)

    def _first(self) -> Reading[str]:
        """Read what stands in front of the first mark, which may be the rest of a header; return the mark behind it."""
        yield from self._scan.skip()
        if not (yield from self._scan.expect(_TO)):
            return (yield from self._scan.until(self._between, lambda part: self._target.emit(Text(part)))).marker
        header = yield from self._header(f" {_TO}")
        return "" if header is None else (yield from self._message(header))

    def _header(self, marker: str) -> Reading[str | None]:
        """Return the header that a mark begins, None if it does not end."""
        parts = [marker]
        found = yield from self._scan.until(Markers.of((self._channels.message,)), parts.append)
        self._unfinished = "".join(parts)
        return self._unfinished if found.marker else None

    def _message(self, header: str) -> Reading[str]:
        """Read a message; return the mark behind it."""
        channels = self._channels
        recipient = self._recipient.search(header)
        name = recipient[1] if recipient else ""
        if name in self._target.tools.names:
            return (yield from self._call(name))
        _, _, channel = header.partition(channels.channel)
        return (yield from self._words(Reasoning if channel.split()[:1] == [channels.thought] else Text))

    def _words(self, kind: type[Reasoning | Text]) -> Reading[str]:
        """Read a thought or text, behind a line end if the message before has the same; return the mark behind it."""
        goes_on = self._last is kind

        def event(part: str) -> Event:
            nonlocal goes_on
            text = f"\n{part}" if goes_on else part
            goes_on, self._last = False, kind
            return kind(text)

        passes = None if kind is Text and self._drops_text else self._between.passing(event)
        emit = self._target.emit
        return (yield from self._scan.until(self._between, lambda part: emit(event(part)), passes=passes)).marker

    def _call(self, name: str) -> Reading[str]:
        if (yield from self._scan.skip()) != "{":
            return (yield from self._without_object(name))
        self._last = CallStart
        self._target.start(name)
        yield from stream_object(self._target, self._channels.ends[0])
        found = yield from self._scan.until(self._between, lambda _: None)
        self._target.end()
        return found.marker

    def _without_object(self, name: str) -> Reading[str]:
        """Read a call without arguments, or with something else, which is text; return the mark behind it."""
        start, self._scan.pinned = self._scan.at, True
        parts: list[str] = []
        found = yield from self._scan.until(self._between, parts.append)
        self._scan.pinned = False
        if "".join(parts).strip() in ("", *NO_ARGUMENTS) and self._target.whole(name, {}):
            self._last = CallStart
            return found.marker
        self._scan.at = start
        return (yield from self._words(Text))
