"""ZeRO 3: parameters gathered for each block as it runs; which blocks, in which order, found by a dry run."""
