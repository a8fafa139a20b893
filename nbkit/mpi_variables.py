"""Handles the variables by which mpirun, or srun with PMI, tells a process its number and the number of processes."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

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


def without_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` for agents, without the variables of an MPI job that the notebook may be a process of.

    Otherwise every agent would see the notebook's number, and would take itself for the host of that number.
    """
    return {name: value for name, value in environment.items() if not name.startswith(_OF_A_PROCESS)}


def forget_mpi(environment: MutableMapping[str, str]) -> None:
    """Remove the variables that a rank inherits from such a notebook.

    Otherwise libraries would take the notebook's number for the rank's, and MPI_Init would join the notebook's job.
    """
    for name in [name for name in environment if name.startswith(_OF_A_PROCESS)]:
        del environment[name]
