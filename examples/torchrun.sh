#!/usr/bin/env bash
# Train on several nodes, by hand or from any scheduler: run the same line on every node.
#
#   HEAD=node1 examples/torchrun.sh configs/llama3_8b.toml --set save.url=s3://bucket/run --set mesh.dp_shard=-1
#
# The job begins with MIN_NODES and takes up to MAX_NODES; nodes may leave and come (docs/clusters.md).
set -euo pipefail

HEAD=${HEAD:?the host that keeps the rendezvous, by a name or address that all nodes reach}
MIN_NODES=${MIN_NODES:-1}
MAX_NODES=${MAX_NODES:-4}
GPUS=${GPUS:-8}
JOB=${JOB:-titan}

export AWS_ENDPOINT_URL=${AWS_ENDPOINT_URL:-https://s3.amazonaws.com}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # torch 2.13: without it a node that joins later waits in vain
if [[ -n ${INTERFACE:-} ]]; then
    export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE # where a host's name is not its address in the cluster
fi

# SIGTERM to an agent: its ranks get shutdown-timeout for a last checkpoint (save.grace_s must be less).
# An agent that is silent for 3 x 5 s is gone. read_timeout must outlast the outages of the network that the job should survive.
exec torchrun \
    --nnodes="$MIN_NODES:$MAX_NODES" \
    --nproc-per-node="$GPUS" \
    --max-restarts=100 \
    --shutdown-timeout=300 \
    --rdzv-id="$JOB" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$HEAD:29400" \
    --rdzv-conf=join_timeout=900,last_call_timeout=10,keep_alive_interval=5,keep_alive_max_attempt=3,read_timeout=300 \
    -m titan_ckpt train "$@" --set save.grace_s=280
