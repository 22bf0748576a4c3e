"""How models think and call tools: declarations, one streaming parser, and what follows from both."""
