"""ZeRO 3: parameters are gathered for each block as it runs. A dry run finds the blocks and their order."""
