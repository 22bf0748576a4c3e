"""Text to token ids and back: templates, detokenizer, stop strings, tool calls."""
