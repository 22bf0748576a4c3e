"""HTTP inside a service's process, on its event loop. Imported only where a service is told to listen for it."""
