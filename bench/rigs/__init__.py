"""Rigs of the benchmarks: kernels, servers, ranks without a notebook, slowed links, the peers, published formulas."""
