# What both ways to start a node share. What is set already stays.
export NODES="${NODES:-48}"            # of 16 NPUs: 24 to a supernode
export DEVICES="${DEVICES:-16}"
export MASTER_PORT="${MASTER_PORT:-29500}"
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-3600}"  # seconds that ranks may wait for each other at the start
export HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-3600}"        # and in a collective, while a rank writes a checkpoint
export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}"  # experts' sizes change every step
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-2}"           # launch kernels from a second thread
export CPU_AFFINITY_CONF="${CPU_AFFINITY_CONF:-1}"           # keep ranks on the cores beside their NPUs
