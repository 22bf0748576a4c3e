"""The live block map: a page that shows pools in operation, and a sandbox to operate one by hand."""
