"""Which modules of a model are split over the tensor axis, and how: said by a plan, or found in the module tree."""
