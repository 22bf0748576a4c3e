"""The vendor's tools, where they are installed: where they are, what they run, and what they print."""
