"""Reports that other tools write about a job's processes and devices: NCCL RAS, nvidia-smi, DCGM; stacks by gdb and py-spy."""
