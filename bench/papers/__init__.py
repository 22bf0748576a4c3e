"""The figures of the papers that Quire implements, remade: `make papers`."""
