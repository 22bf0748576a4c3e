"""Programs that a benchmark runs in processes of their own, also on the code of an earlier commit."""
