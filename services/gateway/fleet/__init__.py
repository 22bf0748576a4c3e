"""A gateway's engines: discovery, links, routing, dispatch."""
