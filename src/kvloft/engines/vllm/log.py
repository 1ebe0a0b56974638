"""The log: below vLLM's own logger, the only one for which vLLM sets up output."""

from vllm.logger import init_logger

logger = init_logger("vllm.kvloft")
