"""Launchers that start agents on other hosts: Slurm, SSH, mpirun, or a step of the job that the notebook runs in."""
