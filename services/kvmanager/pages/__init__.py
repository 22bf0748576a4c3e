"""The live block map: a page that shows pools while they work, and a sandbox to drive one by hand."""
