"""JSON schemas as llguidance gets them."""
