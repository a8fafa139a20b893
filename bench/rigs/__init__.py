"""Rigs of the benchmarks: kernels, servers, ranks without a notebook, the peers, and what the literature says."""
