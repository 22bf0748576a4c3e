"""Anthropic's Messages API, translated to chats."""
