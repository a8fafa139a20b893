"""Benchmarks of slow links and slow ranks, and of nbkit's remedies."""
