"""What is in the loft: full chunks, window and state chunks, and the resume points that need them.

A request can continue at a boundary if the full chunks up to it are resident and, on models with
windows or states, if the boundary is a *resume point*: a claim that holds references to the window
and state chunks it needs. Window chunks are shared by the resume points whose windows overlap and
go with the last of them; losing a resume point never leaves a part of it claimed.

Stores are ended in the order in which they began (:meth:`Catalog.end` refuses any other), so what a
store builds upon is resident or failed before the store itself ends. If one fails, all that are
under way are abandoned with it: nothing resident can then depend on bytes that were never written.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvloft.arena import Arena
from kvloft.catalog.policies import EvictionPolicy, Room, Use
from kvloft.catalog.sightings import NO_VISIT, Sightings, Visit
from kvloft.catalog.tree import DOOMED, FREE, NONE, READY, ROOT, WRITING, Tree
from kvloft.catalog.uses import NO_USE
from kvloft.keys import Keys
from kvloft.plan import ChunkLayout, ChunkPlan, Piece

_MAX_WORK = 1024
"""What making room for one store may cost: bounds the time of a scheduler call. A look at an entry
counts 1, and giving up a resume point 1 more for every four window chunks it refers to. Where one
resume point takes the room of more chunks than that, it is twice their number: a bound that it can
never keep would mean no hits at all."""
_MAX_SUPERSEDE_STEPS = 256
_MAX_WORTH_STEPS = 1024
_MIB = 1 << 20
_REMEMBERED = 1 << 18
"""Records of prompts: 2 MiB."""

NO_SLOT = -1
STATE = -1
"""In place of a column: the state chunk."""


@dataclass(slots=True)
class Counters:
    """Totals since the start; units in the names."""

    stored_chunks: int = 0
    stored_bytes: int = 0
    stored_resume_points: int = 0
    evicted_chunks: int = 0
    evicted_bytes: int = 0
    evicted_resume_points: int = 0
    dropped_stores: int = 0
    """Chunks or resume points that were not stored because no room could be made."""
    declined_stores: int = 0
    """The same because all that is held is worth more."""
    failed_stores: int = 0
    promoted_chunks: int = 0
    """Brought back from a lower tier."""
    promoted_bytes: int = 0


@dataclass(slots=True)
class Chunks:
    """Chunks of one class, one behind the other: their slots, and where their blocks are."""

    slots: list[int]
    layout: ChunkLayout
    boundary: int
    """Tokens: where the last of them ends."""
    kind: str
    """``full``, ``window`` or ``state``; only of full ones there is more than one."""


@dataclass(slots=True)
class Missing:
    """A window chunk that a resume point needs and nobody has."""

    holder: int
    column: int
    layout: ChunkLayout
    boundary: int


@dataclass(slots=True)
class Store:
    """A store under way: what it adds to the catalog, and the slots that must be filled for it."""

    nodes: list[int] = field(default_factory=list)
    uses: list[tuple[int, Use | None]] = field(default_factory=list)
    """What is known of the nodes, and of how many of them, one behind the other."""
    resumes: list[int] = field(default_factory=list)
    resume_uses: list[Use | None] = field(default_factory=list)
    pieces: list[tuple[int, int]] = field(default_factory=list)
    writes: list[Chunks] = field(default_factory=list)
    replaced: list[tuple[bytes, int]] = field(default_factory=list)
    """``(key above, below)``: resume points that are not needed once that below is one."""
    superseded: list[tuple[int, int]] = field(default_factory=list)
    """Once it has ended: ``(above, below)``, resume points that are worth less for it."""
    abandoned: bool = False
    promoted: bool = False
    """The bytes come from a lower tier and are in their slots already."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest resume that a look-up found."""

    node: int
    """Where to resume; the root where there is nothing better than what the engine has."""
    boundary: int
    """Tokens."""
    branch: int
    """Boundary (tokens) at which the request leaves a path that others go on with and where no
    resume point is; 0 if there is none. It deserves one."""
    deepest: int
    """The node of the longest resident part of the path, whether or not one can resume there."""


def room_of(plan: ChunkPlan, budget: int) -> Room:
    """What a policy has to give away."""
    return Room(budget, plan.full_chunk_bytes, plan.resume_bytes, plan.tokens_per_chunk)


class Catalog:
    """The scheduler's view of one arena. Not thread-safe; no call blocks or copies chunk bytes."""

    def __init__(self, plan: ChunkPlan, arena: Arena, policy: EvictionPolicy) -> None:
        self.plan = plan
        self.arena = arena
        self.policy = policy
        self.tree = Tree(plan.tokens_per_chunk)
        self.counters = Counters()
        self.resume_points = 0
        """Resident."""
        self.live_bytes = 0
        """Exact bytes of all chunks that hold a slot."""
        self._held = {"full": [0, 0], "window": [0, 0], "state": [0, 0]}
        columns = 2 * len(plan.window_sets)
        self._slot = array("q", [NO_SLOT])
        self._resume = array("b", [FREE])
        self._state_slot = array("q", [NO_SLOT])
        # Column 2s holds the short window chunk of set s, column 2s + 1 the whole one.
        self._piece = [array("q", [NO_SLOT]) for _ in range(columns)]
        self._refs = [array("i", [0]) for _ in range(columns)]
        self._newest = self._newest_columns()
        self._used_whole = array("q", [0])
        """Bit s: the resume point's oldest chunk of set s is a whole one where a short one would
        do; which of the two it holds a reference to must not depend on what came later."""
        self._stores: deque[Store] = deque()
        sizes = plan.slot_sizes()
        self._work = max(_MAX_WORK, 2 * plan.resume_bytes // min(sizes)) if sizes else _MAX_WORK
        self._work_left = 0
        self._unpublished: set[tuple[int, int]] = set()
        """``(node, column)`` of the window chunks that stores under way are writing."""
        self.sightings = Sightings(_REMEMBERED, plan.tokens_per_chunk)

    # ---------------------------------------------------------------- prompts

    def visit(self, keys: Keys, limit: int) -> Visit:
        """Take note of a prompt of ``limit`` chunks; what was known of its prefixes. O(log n)."""
        visit, sightings = self.sightings.visit(keys, limit)
        self.policy.saw(sightings)
        return visit

    def worth(self, depth: int, above: int) -> float:
        """Tokens that a resume at ``depth`` chunks saves per MiB that it keeps, where one could
        resume at ``above`` chunks otherwise. Window chunks shared with others are not deducted."""
        plan = self.plan
        if not plan.has_resume_points:
            return 1.0
        nbytes = sum(piece.layout.nbytes for piece in plan.pieces(depth))
        nbytes += plan.state_layout.nbytes if plan.state_layout is not None else 0
        nbytes += (depth - above) * plan.full_chunk_bytes
        return (depth - above) * plan.tokens_per_chunk * _MIB / max(1, nbytes)

    def resume_above(self, node: int) -> int:
        """Depth (chunks) of the nearest resume point above ``node`` that will stay one, since paths
        part there; 0 if there is none, or none near enough to be looked for."""
        tree, resume = self.tree, self._resume
        for _ in range(_MAX_WORTH_STEPS):
            alone = tree.only_child(node)
            node = tree.parent[node]
            if node <= ROOT:
                break
            if not alone and resume[node] == READY:
                return tree.depth[node]
        return 0

    # ---------------------------------------------------------------- look-up

    def match(self, keys: Keys, limit: int, above: int, visit: Visit = NO_VISIT) -> Match:
        """The greatest boundary in ``(above, limit]`` tokens where a request can resume.

        Marks what it finds as used. O(log n) for the full chunks, then a walk up to the nearest
        resume point.
        """
        tree, size = self.tree, self.plan.tokens_per_chunk
        deepest = tree.deepest(keys, limit // size, ready=True)
        node = deepest
        if self.plan.has_resume_points:
            resume, parent, depth, least = self._resume, tree.parent, tree.depth, above // size
            short, whole, claims = *self._newest, not self.plan.state_groups
            while node != ROOT and resume[node] != READY and depth[node] > least:
                if claims and (short[node] >= 0 or whole[node] >= 0) and self._claim(node):
                    break
                node = parent[node]
            if node != ROOT and resume[node] != READY:
                node = ROOT
        if deepest != ROOT and (node != deepest or not self.plan.has_resume_points):
            self._use(2 * deepest, visit)
        if node != ROOT and self.plan.has_resume_points:
            self._use(2 * node + 1, visit)
        branch = 0
        if node != deepest and tree.has_children(deepest):
            branch = tree.depth[deepest] * size
        boundary = tree.depth[node] * size
        if boundary <= above:
            node, boundary = ROOT, 0
        return Match(node, boundary, branch, deepest)

    def _use(self, entry: int, visit: Visit) -> None:
        """An entry is used by a request."""
        tree, node = self.tree, entry >> 1
        depth = tree.depth[node]
        worth = self.worth(depth, self.resume_above(node)) if self.plan.has_resume_points else 1.0
        self.policy.insert(entry, visit.use(depth, tree.key(node), worth))

    def _newest_columns(self) -> tuple[Sequence[int], Sequence[int]]:
        """Columns one of which has a slot at every node that is worth a try of :meth:`_claim`: a
        resume needs the newest chunk of a window, while one of local chunks may need nothing."""
        for index, window_set in enumerate(self.plan.window_sets):
            if window_set.groups[0].reach:
                return self._piece[2 * index], self._piece[2 * index + 1]
        return range(1 << 62), range(1 << 62)  # Not negative at any node.

    def _claim(self, node: int) -> bool:
        """Make a resume point of a resident node that needs nothing but what others have stored:
        its windows overlap theirs, or local chunks end exactly there. Takes references only."""
        if self._resume[node] != FREE:
            return False
        pieces = self.plan.pieces(self.tree.depth[node])
        if pieces:  # An oldest one is missing most often.
            holder = self.tree.ancestor(node, pieces[-1].chunks_back)
            if self._find_piece(pieces[-1], holder) < 0:
                return False
        found = []
        for piece, holder in self._needed_pieces(node):
            column = self._find_piece(piece, holder)
            if column < 0 or (holder, column) in self._unpublished:
                return False
            found.append((piece, holder, column))
        self._resume[node] = READY
        self._used_whole[node] = 0
        self.resume_points += 1
        self.policy.remove(2 * node)
        for piece, holder, column in found:
            self._take_piece(node, piece, holder, column)
        return True

    def _take_piece(self, node: int, piece: Piece, holder: int, column: int) -> None:
        """Let the resume point ``node`` refer to a window chunk that is there."""
        self._refs[column][holder] += 1
        if column % 2 and not piece.whole:
            self._used_whole[node] |= 1 << piece.window_set

    def pin(self, node: int) -> None:
        """Keep ``node``, all above it and its resume point until :meth:`unpin`."""
        self.tree.pins[node] += 1

    def unpin(self, node: int) -> None:
        """End one :meth:`pin`."""
        tree = self.tree
        if tree.pins[node] < 1:
            raise ValueError(f"node {node} is not pinned")
        tree.pins[node] -= 1
        if tree.pins[node]:
            return
        if tree.state[node] == DOOMED:
            self._prune(node)
        elif tree.state[node] == READY:
            # Eviction may have met and dropped it while it was pinned.
            entry = 2 * node + (self._resume[node] == READY)
            if entry not in self.policy:
                self.policy.insert(entry, None)

    def reads(self, node: int, above: int) -> Iterator[Chunks]:
        """Every chunk that a resume at ``node`` reads.

        ``above`` (tokens): full chunks that end there or before are left out.
        """
        tree, size = self.tree, self.plan.tokens_per_chunk
        yield from self.full_chunks(node, above)
        if not self.plan.has_resume_points:
            return
        depth = tree.depth[node]
        for piece, holder, column in self._held_pieces(node):
            layout = piece.layout
            if column % 2 and not piece.whole:
                layout = self.plan.whole_layout(piece.window_set)
            boundary = (depth - piece.chunks_back) * size
            yield Chunks([self._piece[column][holder]], layout, boundary, "window")
        if (state := self.plan.state_layout) is not None:
            yield Chunks([self._state_slot[node]], state, depth * size, "state")

    def full_chunks(self, node: int, above: int) -> Iterator[Chunks]:
        """The full chunks among :meth:`reads`, all in one."""
        parent, slot, size = self.tree.parent, self._slot, self.plan.tokens_per_chunk
        depth = self.tree.depth[node]
        if (full := self.plan.full_layout) is None or depth * size <= above:
            return
        slots = []
        for _ in range(depth - above // size):
            slots.append(slot[node])
            node = parent[node]
        slots.reverse()
        yield Chunks(slots, full, depth * size, "full")

    def _needed_pieces(self, node: int) -> Iterator[tuple[Piece, int]]:
        """The window chunks that a resume at ``node`` needs, each with the node it belongs to."""
        parent = self.tree.parent
        holder, back = node, 0
        for piece in self.plan.pieces(self.tree.depth[node]):
            if piece.chunks_back == 0:
                holder, back = node, 0
            while back < piece.chunks_back:
                holder, back = parent[holder], back + 1
            yield piece, holder

    def _held_pieces(self, node: int) -> Iterator[tuple[Piece, int, int]]:
        """A resume point's window chunks, each with the node and the column that hold it."""
        used_whole = self._used_whole[node]
        for piece, holder in self._needed_pieces(node):
            whole = piece.whole or bool(used_whole >> piece.window_set & 1)
            yield piece, holder, 2 * piece.window_set + whole

    def full_slot(self, node: int) -> int:
        """Where the full chunk of ``node`` lies."""
        return self._slot[node]

    def resume_chunks(self, node: int) -> Iterator[tuple[int, int, int, ChunkLayout]]:
        """``(holder, column, slot, layout)`` of what a resume point needs besides full chunks; the
        state's column is :data:`STATE`."""
        for _, holder, column in self._held_pieces(node):
            slot = self._piece[column][holder]
            yield holder, column, slot, self.column_layout(holder, column)
        if (state := self.plan.state_layout) is not None:
            yield node, STATE, self._state_slot[node], state

    def holds_piece(self, piece: Piece, holder: int) -> bool:
        """Whether ``holder`` has, or is about to have, the bytes of ``piece``."""
        return self._find_piece(piece, holder) >= 0

    def is_resume(self, node: int) -> bool:
        """Whether a request can continue at ``node`` now."""
        return self.tree.state[node] == READY and (
            not self.plan.has_resume_points or self._resume[node] == READY
        )

    # ---------------------------------------------------------------- stores

    def begin(self, *, promoted: bool = False) -> Store:
        """Start a store; :meth:`end` it exactly once, after those that began before it."""
        store = Store(promoted=promoted)
        self._stores.append(store)
        self._work_left = self._work
        return store

    @property
    def busy(self) -> bool:
        """Whether making room for the latest store has used half of what it may; what can do
        without another resume point should, since one that does not fit in the end is for nothing.
        """
        return self._work_left < self._work // 2

    def cancel(self, store: Store) -> None:
        """Take back a store that nothing was added to; it must be the latest one."""
        if store.writes or self._stores[-1] is not store:
            raise ValueError("only the latest store, and an empty one, can be cancelled")
        self._stores.pop()

    def add_chunks(
        self, store: Store, parent: int, keys: Sequence[bytes], use: Use | None = None
    ) -> list[int]:
        """Reserve the full chunks that follow ``parent``, one below the other; their nodes.

        Fewer than there are ``keys`` where no more room could be made, or where all that is there
        is worth more.
        """
        layout = self.plan.full_layout
        slots = [NO_SLOT] * len(keys)
        if layout is not None:
            pins = self.tree.pins
            pins[parent] += 1
            slots = self._allocate(layout, len(keys), use)
            if not slots:
                self.unpin(parent)
                return []
            pins[parent] -= 1
            # With a child the parent can't go. Its resume point can, and eviction may have met it.
            if self._resume[parent] == READY and 2 * parent + 1 not in self.policy:
                self.policy.insert(2 * parent + 1, None)
        return self._hang(store, parent, keys[: len(slots)], slots, use)

    def adopt_chunk(self, store: Store, parent: int, key: bytes, slot: int) -> int:
        """Add the full chunk that follows ``parent`` and is there already, in a slot from
        :meth:`reserve`; :data:`NO_SLOT` on models without full chunks."""
        return self._hang(store, parent, [key], [slot], None)[0]

    def _hang(
        self, store: Store, parent: int, keys: Sequence[bytes], slots: list[int], use: Use | None
    ) -> list[int]:
        nodes = self.tree.add_path(parent, keys)
        self._grow()
        for node, slot in zip(nodes, slots, strict=True):
            self._slot[node] = slot
        store.nodes.extend(nodes)
        store.uses.append((len(nodes), use))
        if (full := self.plan.full_layout) is not None:
            size, before = self.plan.tokens_per_chunk, store.writes[-1] if store.writes else None
            above, boundary = self.tree.depth[parent] * size, self.tree.depth[nodes[-1]] * size
            if before is not None and before.layout is full and before.boundary == above:
                before.slots.extend(slots)
                before.boundary = boundary
            else:
                store.writes.append(Chunks(slots, full, boundary, "full"))
        return nodes

    def has_resume(self, node: int) -> bool:
        """Whether ``node`` is a resume point, or becomes one with a store under way."""
        return self._resume[node] != FREE

    def missing_pieces(self, node: int) -> Iterator[tuple[Piece, int]]:
        """The window chunks that a resume point at ``node`` would have to write, with the
        boundary (tokens) at which each ends."""
        depth, size = self.tree.depth[node], self.plan.tokens_per_chunk
        for piece, holder in self._needed_pieces(node):
            if self._find_piece(piece, holder) < 0:
                yield piece, (depth - piece.chunks_back) * size

    def _find_piece(self, piece: Piece, holder: int) -> int:
        """The column in which ``holder`` has the bytes of ``piece``; a whole chunk has them too."""
        short, whole = 2 * piece.window_set, 2 * piece.window_set + 1
        if not piece.whole and self._piece[short][holder] >= 0:
            return short
        return whole if self._piece[whole][holder] >= 0 else NONE

    def add_resume(self, store: Store, node: int, use: Use | None = None) -> bool:
        """Make ``node`` a resume point: all of its missing chunks get slots, or none of them."""
        self._resume[node] = WRITING
        self._used_whole[node] = 0
        self.pin(node)
        # References first: making room must not take what this very resume point builds upon.
        taken: list[tuple[int, int]] = []
        missing: list[Missing] = []
        depth, size = self.tree.depth[node], self.plan.tokens_per_chunk
        for piece, holder in self._needed_pieces(node):
            column = self._find_piece(piece, holder)
            if column >= 0:
                self._take_piece(node, piece, holder, column)
                taken.append((holder, column))
            else:
                column = 2 * piece.window_set + piece.whole
                boundary = (depth - piece.chunks_back) * size
                missing.append(Missing(holder, column, piece.layout, boundary))
        slots: list[int] = []
        layouts = [gap.layout for gap in missing]
        if (state := self.plan.state_layout) is not None:
            layouts.append(state)
        for layout in layouts:
            if not (found := self._allocate(layout, 1, use)):
                break
            slots += found
        self.unpin(node)
        if len(slots) < len(layouts):
            for slot, layout in zip(slots, layouts, strict=False):
                self._release(slot, layout)
            self._resume[node] = FREE
            self._give_back(taken)
            return False
        self._fill_resume(store, node, missing, slots, use)
        return True

    def adopt_resume(self, store: Store, node: int, slots: dict[tuple[int, int], int]) -> bool:
        """Make ``node`` a resume point of chunks that are there: in the catalog, or in ``slots``
        from :meth:`reserve`, by the node and the column that hold them.

        What it uses is taken out of ``slots``; nothing is if it returns false, because the node is
        a resume point already or a chunk is missing.
        """
        if self._resume[node] != FREE:
            return False
        missing: list[Missing] = []
        found: list[tuple[Piece, int, int]] = []
        used_whole = 0
        depth, size = self.tree.depth[node], self.plan.tokens_per_chunk
        for piece, holder in self._needed_pieces(node):
            column = self._find_piece(piece, holder)
            if column >= 0:
                found.append((piece, holder, column))
                continue
            column = 2 * piece.window_set + piece.whole
            if (holder, column) not in slots:
                column = 2 * piece.window_set + 1
            if (holder, column) not in slots:
                return False
            used_whole |= (column % 2 and not piece.whole) << piece.window_set
            boundary = (depth - piece.chunks_back) * size
            missing.append(Missing(holder, column, self.column_layout(holder, column), boundary))
        given = [(gap.holder, gap.column) for gap in missing]
        if self.plan.state_layout is not None:
            given.append((node, STATE))
            if given[-1] not in slots:
                return False
        self._resume[node] = WRITING
        self._used_whole[node] = used_whole
        for piece, holder, column in found:
            self._take_piece(node, piece, holder, column)
        self._fill_resume(store, node, missing, [slots.pop(at) for at in given], None)
        return True

    def _fill_resume(
        self, store: Store, node: int, missing: list[Missing], slots: list[int], use: Use | None
    ) -> None:
        """Give a resume point the slots of its missing window chunks and, last, of its state."""
        for gap, slot in zip(missing, slots, strict=False):
            self._piece[gap.column][gap.holder] = slot
            self._refs[gap.column][gap.holder] = 1
            store.pieces.append((gap.holder, gap.column))
            self._unpublished.add((gap.holder, gap.column))
            store.writes.append(Chunks([slot], gap.layout, gap.boundary, "window"))
        if (layout := self.plan.state_layout) is not None:
            self._state_slot[node] = slots[-1]
            boundary = self.tree.depth[node] * self.plan.tokens_per_chunk
            store.writes.append(Chunks([slots[-1]], layout, boundary, "state"))
        store.resumes.append(node)
        store.resume_uses.append(use)

    def column_layout(self, holder: int, column: int) -> ChunkLayout:
        """The layout of the window chunk that ``holder`` has, or may have, in ``column``."""
        if column % 2:
            return self.plan.whole_layout(column // 2)
        return self.plan.short_layout(column // 2, self.tree.depth[holder])

    def _give_back(self, references: list[tuple[int, int]]) -> None:
        for holder, column in references:
            self._refs[column][holder] -= 1
            self._free_piece_if_unused(holder, column)

    def end(self, store: Store, ok: bool) -> None:
        """Publish what a store has written, or forget it."""
        if not self._stores or self._stores[0] is not store:
            raise ValueError("stores end in the order in which they began")
        if not ok and not store.abandoned:
            self.counters.failed_stores += 1
            self._abandon_all()
        self._stores.popleft()
        if store.abandoned:
            for write in store.writes:
                for slot in write.slots:
                    self._release(slot, write.layout)
            return
        self._unpublished.difference_update(store.pieces)
        for node in store.nodes:
            self.tree.state[node] = READY
        self._order_chunks(store)
        for node, use in zip(store.resumes, store.resume_uses, strict=True):
            self._resume[node] = READY
            self.resume_points += 1
            if (above := self._superseded_by(node)) != ROOT:
                self._supersede(store, above, node)
            self.policy.remove(2 * node)
            self.policy.insert(2 * node + 1, use)
        for key, node in store.replaced:
            if (above := self.tree.find(key)) != NONE and self._resume[above] == READY:
                self._supersede(store, above, node)
        chunks = sum(len(write.slots) for write in store.writes)
        nbytes = sum(write.layout.nbytes * len(write.slots) for write in store.writes)
        if store.promoted:
            self.counters.promoted_chunks += chunks
            self.counters.promoted_bytes += nbytes
            return
        self.counters.stored_chunks += chunks
        self.counters.stored_bytes += nbytes
        self.counters.stored_resume_points += len(store.resumes)

    def _supersede(self, store: Store, above: int, below: int) -> None:
        store.superseded.append((above, below))
        if not self.tree.pins[above]:
            self.policy.demote(2 * above + 1)

    def _order_chunks(self, store: Store) -> None:
        """Let what a store has added be evicted some day, the deepest first."""
        stop = len(store.nodes)
        if not stop:
            return
        if self.plan.has_resume_points:
            # The others come back into the order with their last dependants.
            self.policy.insert(2 * store.nodes[-1], store.uses[-1][1])
            return
        for count, use in reversed(store.uses):
            nodes = store.nodes[stop - count : stop]
            nodes.reverse()
            stop -= count
            entries = [2 * node for node in nodes]
            self.policy.insert_path(entries, self._name_of, use or NO_USE)

    def _name_of(self, entry: int) -> int:
        return self.tree.name(entry >> 1)

    def _superseded_by(self, node: int) -> int:
        """The nearest resume point above on an unbranched path, which is worth less once ``node``
        is one: it goes first. The root where there is none."""
        tree = self.tree
        for steps in range(1, _MAX_SUPERSEDE_STEPS + 1):
            if not tree.only_child(node):
                return ROOT
            node = tree.parent[node]
            if node == ROOT:
                return ROOT
            # Where a prompt ends on a boundary, the same prompt again resumes one chunk earlier.
            if steps > 1 and self._resume[node] == READY:
                return node
        return ROOT

    def _abandon_all(self) -> None:
        """Forget what the stores under way would add; their slots stay taken until they end."""
        given_up: list[tuple[int, int]] = []
        for store in reversed(self._stores):
            if store.abandoned:
                continue
            store.abandoned = True
            self._unpublished.difference_update(store.pieces)
            own = set(store.pieces)
            for node in reversed(store.resumes):
                held = [(holder, column) for _, holder, column in self._held_pieces(node)]
                for holder, column in held:
                    self._refs[column][holder] -= 1
                given_up.extend(reference for reference in held if reference not in own)
                self._state_slot[node] = NO_SLOT
                self._resume[node] = FREE
                if self.tree.state[node] == READY:
                    self.policy.insert(2 * node, None)
            # Whoever else referred to these came later, and so was abandoned before.
            for holder, column in store.pieces:
                self._piece[column][holder] = NO_SLOT
            for node in reversed(store.nodes):
                self._slot[node] = NO_SLOT
                parent = self.tree.remove(node)
                self._revive(parent, parent)  # Nobody has used what never came to be.
        for holder, column in given_up:
            self._free_piece_if_unused(holder, column)

    # ---------------------------------------------------------------- memory

    def _grow(self) -> None:
        missing = self.tree.capacity - len(self._slot)
        if missing > 0:
            nowhere = array("q", [NO_SLOT]) * missing
            for slots in (self._slot, self._state_slot, *self._piece):
                slots.extend(nowhere)
            self._resume.extend([FREE] * missing)
            for numbers in (self._used_whole, *self._refs):
                numbers.extend([0] * missing)

    def _allocate(self, layout: ChunkLayout, count: int, newcomer: Use | None = None) -> list[int]:
        """Slots, after evicting what must go for them; fewer if that did not make room, or if all
        is worth more than ``newcomer``."""
        slots: list[int] = []
        while True:
            found = self.arena.allocate_up_to(layout.slot_bytes, count - len(slots))
            if found:
                self._count_held(layout, len(found))
                slots += found
            if len(slots) == count:
                return slots
            before = len(self.policy)
            entry = self.policy.victim(self._evictable, self._work_left, newcomer)
            self._work_left -= before - len(self.policy)
            if entry is None:
                if newcomer is not None and self._work_left > 0 and len(self.policy):
                    self.counters.declined_stores += 1
                else:
                    self.counters.dropped_stores += 1
                return slots
            if layout is self.plan.full_layout and not entry & 1 and not self._resume[entry >> 1]:
                slots += self._hand_over(entry >> 1, layout, count - len(slots))
            else:
                self._evict(entry)

    def _count_held(self, layout: ChunkLayout, change: int) -> None:
        plan = self.plan
        name = "full" if layout is plan.full_layout else "window"
        held = self._held["state" if layout is plan.state_layout else name]
        held[0] += change
        held[1] += change * layout.nbytes
        self.live_bytes += change * layout.nbytes

    def held(self) -> dict[str, tuple[int, int]]:
        """By class: chunks that hold a slot, and their exact bytes."""
        return {name: (chunks, nbytes) for name, (chunks, nbytes) in self._held.items()}

    def _hand_over(self, node: int, layout: ChunkLayout, count: int) -> list[int]:
        """Evict a full chunk, and up to ``count`` that go with it, for others, which take their
        slots: what a full arena does most. The end of a path goes at once as far as it would one by
        one."""
        tree, held, slots = self.tree, self._slot, list[int]()
        while True:
            slots.append(held[node])
            held[node] = NO_SLOT
            gone, node = node, tree.remove(node)
            if len(slots) == count or not self._follows(node, gone):
                break
        self.counters.evicted_chunks += len(slots)
        self.counters.evicted_bytes += len(slots) * layout.nbytes
        self._revive(node, gone)
        return slots

    def _follows(self, node: int, after: int) -> bool:
        """Whether ``node`` goes next, now that its last dependant has gone."""
        if node == ROOT or not self._evictable(2 * node):
            return False
        if self.plan.has_resume_points:  # Such a one always does; see :meth:`_revive`.
            self.policy.remove(2 * node)
            return True
        return self.policy.follow(2 * node, 2 * after)

    def reserve(self, layouts: Sequence[ChunkLayout]) -> list[int]:
        """Slots that belong to the caller, until it adds them with a store or gives them up.

        Fewer than asked for where no more room could be made.
        """
        self._work_left = self._work
        slots: list[int] = []
        for layout in layouts:
            if not (found := self._allocate(layout, 1)):
                break
            slots += found
        return slots

    def give_up(self, slot: int, layout: ChunkLayout) -> None:
        """Take back a slot from :meth:`reserve`."""
        self._release(slot, layout)

    def _release(self, slot: int, layout: ChunkLayout) -> None:
        self.arena.free(slot)
        self._count_held(layout, -1)

    def _evictable(self, entry: int) -> bool:
        tree, node = self.tree, entry >> 1
        if tree.pins[node]:
            return False
        if entry & 1:
            return self._resume[node] == READY
        return (
            tree.first_child[node] < 0 and tree.state[node] == READY and self._resume[node] == FREE
        )

    def _evict(self, entry: int) -> None:
        node = entry >> 1
        if entry & 1:
            self._drop_resume(node)
            self._revive(node, node)
            return
        self._revive(self._drop_node(node), node)

    def _revive(self, node: int, after: int) -> None:
        """Bring a node that may have lost its last dependant, ``after``, back into the order. A
        chunk below which nobody can resume any more goes next."""
        tree, policy = self.tree, self.policy
        if tree.first_child[node] >= 0 or tree.state[node] != READY or node == ROOT:
            return
        if self._resume[node] == READY:
            if 2 * node + 1 not in policy:
                policy.insert(2 * node + 1, None)
        elif self.plan.has_resume_points:
            policy.demote(2 * node)
        elif 2 * node not in policy:
            policy.revive(2 * node, 2 * after)

    def _drop_resume(self, node: int) -> None:
        self.policy.remove(2 * node + 1)
        self._work_left -= len(self.plan.pieces(self.tree.depth[node])) // 4
        self._give_back([(holder, column) for _, holder, column in self._held_pieces(node)])
        if (layout := self.plan.state_layout) is not None:
            self._release(self._state_slot[node], layout)
            self._state_slot[node] = NO_SLOT
            self._count_eviction(layout)
        self._resume[node] = FREE
        self.resume_points -= 1
        self.counters.evicted_resume_points += 1

    def _free_piece_if_unused(self, holder: int, column: int) -> None:
        slot = self._piece[column][holder]
        if slot < 0 or self._refs[column][holder]:
            return
        self._piece[column][holder] = NO_SLOT
        layout = self.column_layout(holder, column)
        self._release(slot, layout)
        self._count_eviction(layout)

    def _drop_node(self, node: int) -> int:
        if self._resume[node] == READY:
            self._drop_resume(node)
        self.policy.remove(2 * node)
        if (layout := self.plan.full_layout) is not None:
            self._release(self._slot[node], layout)
            self._count_eviction(layout)
        self._slot[node] = NO_SLOT
        return self.tree.remove(node)

    def _count_eviction(self, layout: ChunkLayout) -> None:
        self.counters.evicted_chunks += 1
        self.counters.evicted_bytes += layout.nbytes

    # ---------------------------------------------------------------- forgetting

    def reset(self) -> None:
        """Forget everything at once. What is being read or written keeps its slots until it ends;
        none of it is ever found again."""
        self.forget(ROOT)

    def forget(self, top: int) -> None:
        """Forget ``top`` and all below it, stores under way included, as :meth:`reset` does it.

        For bytes that have turned out wrong: what lies below them is of no use without them, and
        window chunks are only needed by resume points below. O(nodes below), as it is rare.
        """
        self._abandon_all()
        tree = self.tree
        for node in reversed(self._subtree(top)):
            if tree.pins[node] or tree.has_children(node):
                tree.unindex(node)
                tree.state[node] = DOOMED
                self.policy.remove(2 * node)
                self.policy.remove(2 * node + 1)
            else:
                parent = self._drop_node(node)
                if node == top:
                    self._revive(parent, node)

    def _subtree(self, top: int) -> list[int]:
        """``top``, unless it is the root, and all nodes below it, parents first."""
        tree = self.tree
        if tree.state[top] == FREE:
            return []
        found = [top]
        for node in found:  # Which grows meanwhile.
            found.extend(tree.children(node))
        return found[1:] if top == ROOT else found

    def holder_of(self, node: int, slot: int) -> int:
        """The node on the path to ``node`` that a slot of a resume at ``node`` belongs to;
        ``NONE`` if it is none of them."""
        if self.plan.full_layout is not None:
            for step in self.tree.path(node):
                if self._slot[step] == slot:
                    return step
        if self.plan.has_resume_points and self._resume[node] == READY:
            for holder, _, held, _ in self.resume_chunks(node):
                if held == slot:
                    return holder
        return NONE

    def _prune(self, node: int) -> None:
        tree = self.tree
        while tree.state[node] == DOOMED and not tree.pins[node] and not tree.has_children(node):
            gone = node
            node = self._drop_node(node)
            self._revive(node, gone)
