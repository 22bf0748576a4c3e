"""HTTP servers inside a service's process, on its event loop. Imported only if a service listens for HTTP."""
