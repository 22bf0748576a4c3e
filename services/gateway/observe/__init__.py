"""What observes requests: reports, metrics, accounting. Nothing here changes what happens to a request."""
