"""The demo model in the formats that people publish."""
