"""Data parallelism and ZeRO 1 and 2: what each rank holds, how gradients are summed, and how many bytes are sent."""
