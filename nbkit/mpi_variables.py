"""The variables by which an mpirun, or srun with PMI, tells a process which one of how many it is."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

# Settings of MPI's own, such as OMPI_MCA_... and OMPI_ALLOW_RUN_AS_ROOT, are none of these.
_OF_A_PROCESS = (
    "OMPI_COMM_WORLD_",
    "PMI_",
    "PMIX_RANK",
    "PMIX_NAMESPACE",
    "PMIX_SERVER",
    "MPI_LOCAL",
    "MV2_COMM_WORLD_",
    "HYDI_",
)


def without_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for agents, from a notebook that may itself be a process of an MPI job.

    Its number would reach every agent, and each would take itself for the host of that number.
    """
    return {name: value for name, value in environment.items() if not name.startswith(_OF_A_PROCESS)}


def forget_mpi(environment: MutableMapping[str, str]) -> None:
    """Take out what a rank has from such a notebook: libraries would take the notebook's number for the rank's, and
    MPI_Init would join the notebook's job."""
    for name in [name for name in environment if name.startswith(_OF_A_PROCESS)]:
        del environment[name]
