"""A GPU and NCCL that are pretended on CPU ranks, so that what only they do goes wrong here too.

`join(rank, ranks)` in a rank that `run_ranks(..., join=False)` made: CPU tensors then count as tensors of a device,
those of `PretendAccelerator.host` excepted, and groups follow NCCL's rules over gloo. Inside `checked(gpu)` every
operation is checked for whether something else could still be reading or writing what it touches.
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
