"""OpenAI's interface: requests, answers and the translation between."""
