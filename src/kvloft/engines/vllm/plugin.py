"""The ``vllm.general_plugins`` entry point: makes the connector known by its name alone."""

import contextlib


def register() -> None:
    """Register ``KVLoftConnector``; called by vLLM in each of its processes, maybe repeatedly."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name = "KVLoftConnector"
    with contextlib.suppress(ValueError):  # Registered already in this process.
        KVConnectorFactory.register_connector(name, "kvloft.engines.vllm.connector", name)
