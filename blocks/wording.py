"""Words of messages that engine, KV manager and services share."""


def counted(count: int, noun: str) -> str:
    """Return a count with its noun in the singular or plural."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
