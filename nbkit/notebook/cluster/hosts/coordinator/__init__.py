"""The process that keeps a line to every host of a cluster: from their agents, to the end of the last rank."""
