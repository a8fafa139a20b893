"""Benchmarks of slow links and slow ranks, and of what nbkit does about them."""
