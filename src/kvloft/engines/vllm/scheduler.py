"""The scheduler's half: tells the loft what vLLM's scheduler decides, and the workers what to copy.

Runs on the scheduler's thread. Most steps are decode steps that cross no boundary; they must cost
next to nothing, so a request's block tables are only asked for when there is something to store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from kvloft.catalog.catalog import room_of
from kvloft.catalog.policies import POLICIES
from kvloft.engines.vllm.log import logger, warn
from kvloft.engines.vllm.messages import Orders, Reports
from kvloft.engines.vllm.metrics import LoftStats, SchedulerMeter, labelled
from kvloft.engines.vllm.setup import Setup, describe
from kvloft.errors import TransferError
from kvloft.faults import Faults
from kvloft.jobs import Job
from kvloft.loft import Loft
from kvloft.lower import LowerTier

if TYPE_CHECKING:
    from vllm.config import CacheConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_T = TypeVar("_T")

_IDLE_WAIT_SECONDS = 0.001
"""While all requests wait for lower tiers; a new one should not wait for longer than that."""
_LEAST_MEASURED = 32
"""Tokens a request in a step from which on the step counts as computing prompts."""

_NOTHING = Orders()
_NOTHING_IDLE = Orders(idle=True)


class SchedulerHalf:
    """One per engine. What vLLM calls here never raises: no defect in KVLoft may end the engine.

    After one the books can't be trusted. Nothing is restored or stored any more; loads under way
    end as ever, since their slots stay theirs.
    """

    def __init__(
        self, setup: Setup, cache_config: CacheConfig, tiers: Sequence[LowerTier] = ()
    ) -> None:
        """``tiers``: the lower ones, which belong to this half from now on."""
        arena = setup.make_arena()
        self._faults = Faults(warn)
        self._mapping = setup.mapping
        self.loft = Loft(
            setup.plan,
            arena,
            POLICIES[setup.options.eviction_policy](room_of(setup.plan, arena.budget)),
            ranks=setup.ranks,
            resume_interval=setup.options.resume_interval,
            prompt_only=setup.options.offload_prompt_only,
            tiers=tiers,
            memory=setup.mapping.data.data,
            seals=setup.make_seals(),
            canary=setup.options.canary,
            tell=self._faults.add,
        )
        self._tokens_per_hash = setup.plan.geometry.tokens_per_hash
        self._cache_config = cache_config
        self._step_tokens = cache_config.block_size if setup.plan.state_groups else None
        self.defect: Exception | None = None
        """What has gone wrong in KVLoft itself."""
        self._untold = True
        """Whether metrics do not show the defect yet."""
        self._volatile = setup.volatile_tokens
        self._requests: dict[str, Request] = {}
        self._loads: list[tuple[str, Job | None]] = []
        self._meter = SchedulerMeter(self.loft)
        self._step_began = 0.0
        self._step_prompt_tokens = 0
        logger.info("KVLoft: %s", describe(setup, arena))

    def _track(self, request: Request) -> None:
        request_id = request.request_id
        if request_id in self._requests:
            return
        self._requests[request_id] = request
        hashes, size = request.block_hashes, self._tokens_per_hash

        def key(boundary: int) -> bytes:
            return bytes(hashes[boundary // size - 1])

        params = request.kv_transfer_params
        self.loft.track(request_id, key, request.num_prompt_tokens, params)

    def _guard(self, call: Callable[[], _T], otherwise: _T) -> _T:
        if self.defect is not None:
            return otherwise
        try:
            return call()
        except Exception as error:
            self.defect = error
            logger.exception(
                "KVLoft: a defect; nothing is restored or stored any more until the engine is "
                "restarted, which goes on serving without. Please report this"
            )
            return otherwise

    def match(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond ``computed`` that can be restored, and that this takes until later.
        ``None``: more is on its way from a lower tier, ask again."""
        self._keep_steps_aligned()
        nothing: tuple[int | None, bool] = (0, False)
        return self._guard(lambda: self._match(request, computed), nothing)

    def _match(self, request: Request, computed: int) -> tuple[int | None, bool]:
        self._track(request)
        if request.skip_reading_prefix_cache:
            return 0, False
        boundary = self.loft.match(request.request_id, request.num_tokens, computed)
        if boundary is None:
            return None, False
        return (boundary - computed, True) if boundary > computed else (0, False)

    def _keep_steps_aligned(self) -> None:
        """Keep prefill steps ending where states live.

        The scheduler ends them at multiples of ``cache_config.block_size``, which the engine core
        has set to the block of its groups before it made this object. Where the core runs in a
        process of its own, vLLM 0.32 then initialises its configuration once more, and on the CPU
        that puts the default back: states would be kept nowhere, for vLLM's own cache either.
        """
        if self._step_tokens is not None and self._cache_config.block_size != self._step_tokens:
            logger.warning(
                "KVLoft: vLLM has reset its block size from %d to %d tokens, which would leave "
                "hardly any recurrent state to reuse; it is set back",
                self._step_tokens,
                self._cache_config.block_size,
            )
            self._cache_config.block_size = self._step_tokens

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Blocks are there: start the load that was offered, or give it up."""
        request_id = request.request_id
        if not external:
            self._guard(lambda: self._release(request), None)
            return
        # vLLM waits for this load now, whatever happens: one that can't be done has to be reported.
        job = self._guard(lambda: self._begin_load(request, blocks, external), None)
        self._loads.append((request_id, job))

    def _release(self, request: Request) -> None:
        self._track(request)
        self.loft.release(request.request_id)

    def _begin_load(self, request: Request, blocks: KVCacheBlocks, external: int) -> Job | None:
        request_id = request.request_id
        tables = blocks.get_block_ids()
        computed = self.loft.matched(request_id) - external
        try:
            return self.loft.begin_load(request_id, computed, tables)
        except TransferError as error:
            self._faults.add(
                "blocks", f"request {request_id} is computed instead of restored: {error}"
            )
            return None

    def orders(self, step: SchedulerOutput) -> Orders:
        """What the workers are to copy in this step."""
        stores: list[Job] = []
        comparisons: list[Job] = []
        self._guard(lambda: self._plan(step, stores, comparisons), None)
        idle = not step.total_num_scheduled_tokens
        if not (stores or comparisons or self._loads):
            return _NOTHING_IDLE if idle else _NOTHING
        loads, self._loads = self._loads, []
        return Orders(loads=loads, stores=stores, comparisons=comparisons, idle=idle)

    def _plan(self, step: SchedulerOutput, stores: list[Job], comparisons: list[Job]) -> None:
        """Decide what to store and to compare."""
        self.loft.step()
        self._measure(step)
        state = step.kv_connector_block_state
        drafts = step.scheduled_spec_decode_tokens
        offers = state.boundary_state_offloads if state is not None else {}
        for request_id, scheduled in step.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None or state is None:
                continue
            # A draft may be rejected, so what it leaves is not final. A boundary whose tokens are
            # not all known yet has no hash; its bytes stay until a later step stores them.
            final = request.num_computed_tokens + scheduled
            if request_id in drafts:
                final -= len(drafts[request_id])
            if self._volatile:
                final = min(final, request.num_tokens - self._volatile)
            reach = min(final, len(request.block_hashes) * self._tokens_per_hash)
            if not self.loft.wants(request_id, reach):
                continue
            tables = state.get_block_ids(request_id)
            if tables is None:
                continue
            states: dict[int, dict[int, int]] = {}
            for group, block, boundary in offers.get(request_id, ()):
                states.setdefault(boundary, {})[group] = block
            job = self.loft.begin_comparison(request_id, reach, tables, states)
            if job is not None:
                comparisons.append(job)
            job = self.loft.begin_store(request_id, reach, tables, states)
            if job is not None:
                stores.append(job)
        if not step.total_num_scheduled_tokens:
            self.loft.pause(_IDLE_WAIT_SECONDS)

    def _measure(self, step: SchedulerOutput) -> None:
        """How fast the engine computes prompts: the time from one step's orders to the next one's,
        which is too long where steps overlap or the engine idles, but never by much for long."""
        now = time.perf_counter()
        if self._step_prompt_tokens:
            self.loft.promoter.measured_compute(self._step_prompt_tokens, now - self._step_began)
        counts = step.num_scheduled_tokens.values()
        tokens = step.total_num_scheduled_tokens
        self._step_prompt_tokens = tokens if tokens >= _LEAST_MEASURED * max(1, len(counts)) else 0
        self._step_began = now

    def finished(self, request: Request) -> None:
        """A request has ended in whatever way."""
        self._requests.pop(request.request_id, None)
        self._guard(lambda: self.loft.forget(request.request_id), None)

    def reported(self, output: KVConnectorOutput) -> None:
        """Ranks have finished jobs."""
        reports = output.kv_connector_worker_meta
        if isinstance(reports, Reports):
            self._guard(lambda: self._report(reports), None)

    def _report(self, reports: Reports) -> None:
        for done in reports.done:
            self.loft.report(done.job, done.rank, not done.cause, done.cause, done.bad_slots)

    def pending(self) -> bool:
        """Whether the engine must go on stepping for reports to come in."""
        return self._guard(lambda: self.loft.pending > 0, False)

    def reset(self) -> bool:
        """Forget all chunks."""
        self._guard(self.loft.reset, None)
        return True  # After a defect nothing is found anyway.

    def stats(self) -> LoftStats | None:
        """What has changed since the last call; ``None`` for nothing."""
        found = self._guard(self._meter.take, None)
        if self.defect is not None and self._untold:
            self._untold = False
            return LoftStats({"loading_enabled": 0, labelled("failures", "schedule", "defect"): 1})
        return found

    def close(self) -> None:
        """End what lower tiers do and let go of the mapping. Idempotent."""
        try:
            self.loft.close()
        except Exception:
            logger.exception("KVLoft: lower tiers could not be closed")
        finally:
            self._mapping.close()
