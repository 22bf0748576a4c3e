"""Output of benchmarks: results, their pictures, and the tables of the pages."""
