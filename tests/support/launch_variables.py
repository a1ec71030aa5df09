"""What torchrun, mpirun and srun set in the environment of a process, as real ones were seen to."""

from __future__ import annotations

TORCHRUN = {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "42547",
    "RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "WORLD_SIZE": "4",
}
"""Rank 1 of 4, on the first of two hosts."""
OPENMPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-node0-28356@1",
}
"""Rank 1 of 4, three of which are on its host."""
SRUN = {
    "SLURM_JOB_ID": "17",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "d[0-1]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
}
"""Rank 1 of 4, three of which are on its host, the first of two."""
