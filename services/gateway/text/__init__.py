"""Text processing: tokenizer, chat template, detokenizer, stop strings, tool calls."""
