"""KVLoft's connector with a rank that can't load: vLLM's workers import it by this name."""

from __future__ import annotations

from typing import Any

from kvloft.engines.vllm.connector import KVLoftConnector


class _Failing:
    def __init__(self, copier: Any) -> None:
        self._copier = copier
        self.store = copier.store
        self.difference = copier.difference

    def load(self, job: Any) -> None:
        raise OSError("this rank can't load")


class OneRankFails(KVLoftConnector):
    """Rank 1 fails at every load."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        if self.worker._rank == 1:
            self.worker._copier = _Failing(self.worker._copier)
