"""The log: below vLLM's own logger, the only one for which vLLM sets up output."""

from vllm.logger import init_logger

logger = init_logger("vllm.kvloft")


def warn(cause: str, message: str) -> None:
    """What a person should know; whoever calls this sees to it that it is not once per request."""
    logger.warning("KVLoft: %s (%s)", message, cause)


def tell(error: BaseException) -> str:
    """An error in one line; where it comes from is in the debug log."""
    logger.debug("KVLoft: an error and where it comes from", exc_info=error)
    return f"{type(error).__name__}: {error}"
