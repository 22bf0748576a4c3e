"""OpenAI's Responses API, translated to chats."""
