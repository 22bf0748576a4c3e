"""What benchmarks write: results, the pictures drawn from them, and the tables of the pages."""
