"""A GPU and NCCL that are pretended on CPU ranks, so that errors that only they cause appear here too.

Call `join(rank, ranks)` in a rank of `run_ranks(..., join=False)`: CPU tensors then count as device tensors, except
those of `PretendAccelerator.host`, and groups follow NCCL's rules over gloo. Inside `checked(gpu)`, every operation is
checked: nothing else may still read or write the memory that it uses.
"""

from pretend.communicator import AbortAfterShutdown as AbortAfterShutdown
from pretend.communicator import ChangedInFlight as ChangedInFlight
from pretend.communicator import Communicator as Communicator
from pretend.communicator import Limits as Limits
from pretend.communicator import Stuck as Stuck
from pretend.communicator import works as works
from pretend.device import ContextLost as ContextLost
from pretend.device import HostMix as HostMix
from pretend.device import PretendAccelerator as PretendAccelerator
from pretend.device import checked as checked
from pretend.install import join as join
from pretend.install import place as place
from pretend.order import Race as Race
