# What both ways to start a node share. What is set already stays.
export NODES="${NODES:-48}"            # of 16 NPUs: 24 to a supernode
export DEVICES="${DEVICES:-16}"
export MASTER_PORT="${MASTER_PORT:-29500}"
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-3600}"  # seconds that ranks may wait for each other at the start
export HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-3600}"        # and in a collective, while a rank writes a checkpoint
export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}"  # experts' sizes change every step
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-2}"           # launch kernels from a second thread
export CPU_AFFINITY_CONF="${CPU_AFFINITY_CONF:-1}"           # keep ranks on the cores beside their NPUs

# torchrun waits without a word for a node that cannot be.
for name in NODES DEVICES NODE_RANK MASTER_PORT; do
    eval "value=\$$name"
    case "$value" in
    '' | *[!0-9]*)
        echo "$name=$value: must be a number" >&2
        exit 2
        ;;
    esac
done
if [ "$NODES" -lt 1 ] || [ "$DEVICES" -lt 1 ] || [ "$NODE_RANK" -ge "$NODES" ]; then
    echo "NODE_RANK=$NODE_RANK NODES=$NODES DEVICES=$DEVICES: nodes have numbers from 0 to NODES - 1, and devices" >&2
    exit 2
fi
