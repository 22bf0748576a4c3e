"""The subcommands of `quire`, one module each."""
