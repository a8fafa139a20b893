"""Tensor parallelism: which module is split how (`plan_of`), and the split itself (`tensor_parallel`)."""

from nbkit.rank.parallel.tensor.apply import TensorSplit, tensor_parallel
from nbkit.rank.parallel.tensor.plan.choose_plan import plan_of
from nbkit.rank.parallel.tensor.plan.plan import TensorPlan
from nbkit.rank.parallel.tensor.sharded_tensor import VocabShard

__all__ = ["TensorPlan", "TensorSplit", "VocabShard", "plan_of", "tensor_parallel"]
