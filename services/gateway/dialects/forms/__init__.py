"""The forms in which models write one call of a tool."""
