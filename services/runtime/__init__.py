"""Runtime that all services share: process, settings, errors, transport, logs, metrics, traces."""
