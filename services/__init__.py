"""The only place with gRPC, asyncio, sockets, environment and clocks: shells around the pure cores."""
