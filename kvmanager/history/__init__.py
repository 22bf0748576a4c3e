"""What happened to blocks: events, the ledger that holds them, records of Steps."""
