"""Starting a cluster: which device each rank gets, and the processes that make it up."""
