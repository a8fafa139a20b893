"""Handles the environment variables by which mpirun, or srun with PMI, tells a process its number in the job."""

from __future__ import annotations

from collections.abc import MutableMapping

# MPI's own settings, such as OMPI_MCA_... and OMPI_ALLOW_RUN_AS_ROOT, do not belong here.
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


def forget_mpi(environment: MutableMapping[str, str]) -> None:
    """Remove the variables that a process inherits from a notebook that is itself a process of an MPI job.

    Otherwise an agent would use the notebook's number as the number of its host, libraries would use it as the rank,
    and MPI_Init would join the notebook's job.
    """
    for name in [name for name in environment if name.startswith(_OF_A_PROCESS)]:
        del environment[name]
