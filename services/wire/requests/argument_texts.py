"""The texts around arguments that calls of tools have one by one: decoding.proto's message as a value."""

from typing import NamedTuple

from quire.v1 import decoding_pb2


class ArgumentTexts(NamedTuple):
    """See the message in decoding.proto. Without `before_text`, strings are JSON."""

    before_key: str = ""
    before_text: str = ""
    after_text: str = ""
    before_value: str = ""
    after_value: str = ""
    separator: str = ""

    @property
    def mark(self) -> str:
        """The text that ends a string, which it cannot have in it."""
        return self.after_text.strip()

    @property
    def are_alike(self) -> bool:
        """Whether a string and another value have the same texts around them."""
        return self.before_text == self.before_value


def argument_texts_message(texts: ArgumentTexts) -> decoding_pb2.ArgumentTexts:
    """Encode the texts."""
    return decoding_pb2.ArgumentTexts(**texts._asdict())


def argument_texts_of(message: decoding_pb2.ArgumentTexts) -> ArgumentTexts:
    """Decode the texts."""
    return ArgumentTexts(*(getattr(message, name) for name in ArgumentTexts._fields))
