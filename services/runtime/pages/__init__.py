"""What the web pages of services have in common: their files, colours and drawings of blocks, and their headers."""
