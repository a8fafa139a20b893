"""Start a cluster: which device each rank gets, and the processes that make up the cluster."""
