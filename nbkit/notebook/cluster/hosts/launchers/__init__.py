"""What brings agents up on other hosts: Slurm, SSH, mpirun, or a step of the job that the notebook runs in."""
