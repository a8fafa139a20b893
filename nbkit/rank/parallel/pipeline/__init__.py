"""Pipeline parallelism: an unmodified model cut into stages, and the schedule that runs them."""
