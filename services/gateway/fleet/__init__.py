"""The engines behind a gateway: discovery, routing, dispatch."""
