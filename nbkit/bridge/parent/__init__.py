"""The process that forks the ranks of a cluster and watches them."""
