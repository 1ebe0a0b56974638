"""Workloads made from a seed: conversations of many users, and agents that call tools.

Text is never made, only its shape. A prompt is a path through a tree of pieces of text, each piece
new and different from all others, so two prompts share exactly the pieces that both went through.
Block ids follow from that: a block's end lies in one piece, hence is one place in the tree.

The loop is closed: somebody asks again when the answer has come and some time has passed, so load
follows from the number of users or agents. Answers come at a fixed speed whatever the cache does,
which keeps a trace the same for all that it is replayed with.

Lengths and pauses are drawn from distributions with heavy tails, as published traces have them
(lengths: log-normal; pauses: exponential; numbers of turns and steps: geometric). Which shared
prompt somebody starts from follows Zipf's law. The defaults are plain round numbers, fitted to no
particular service.
"""

from __future__ import annotations

import difflib
import math
import re
from array import array
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import accumulate, islice
from random import Random
from types import MappingProxyType

from kvloft.errors import TraceError
from kvloft.replay.trace import Request, Trace


@dataclass(frozen=True, slots=True)
class Option:
    """One parameter of a workload: what it may be, and what it means."""

    default: float
    low: float
    high: float
    text: str
    """What it says, with its unit."""

    @property
    def whole(self) -> bool:
        """Whether it has to be a whole number."""
        return isinstance(self.default, int)


_COMMON = {
    "requests": Option(1000, 1, 10_000_000, "requests in all"),
    "seed": Option(0, 0, 2**63 - 1, "another seed makes another trace of the same kind"),
    "tokens_per_block": Option(16, 1, 1 << 20, "tokens that one block id stands for"),
    "speed": Option(50.0, 0.1, 1e6, "tokens a second of every answer"),
    "zipf": Option(1.0, 0.0, 10.0, "how popular the first shared prompts are; 0: all alike"),
}

_CHAT = {
    "users": Option(100, 1, 1_000_000, "people who talk at the same time"),
    "systems": Option(20, 1, 1_000_000, "system prompts that conversations start from"),
    "system_tokens": Option(1000, 1, 1_000_000, "tokens of a system prompt, on average"),
    "turns": Option(5.0, 1.0, 10_000.0, "questions in a conversation, on average"),
    "question": Option(150, 1, 1_000_000, "tokens of a question, on average"),
    "answer": Option(300, 1, 1_000_000, "tokens of an answer, on average"),
    "think": Option(60.0, 0.0, 1e7, "seconds from an answer to the next question, on average"),
    "idle": Option(600.0, 0.0, 1e7, "seconds between a user's conversations, on average"),
    "max_tokens": Option(32_768, 1, 10_000_000, "tokens that end a conversation when reached"),
}

_AGENTS = {
    "agents": Option(20, 1, 1_000_000, "agents at work at the same time, their helpers aside"),
    "systems": Option(5, 1, 1_000_000, "sets of instructions and tools that agents start from"),
    "system_tokens": Option(10_000, 1, 1_000_000, "tokens of such a set, on average"),
    "task": Option(500, 1, 1_000_000, "tokens of a task, on average"),
    "steps": Option(20.0, 1.0, 10_000.0, "requests for a task, on average"),
    "answer": Option(150, 1, 1_000_000, "tokens of an answer (a call of a tool), on average"),
    "tool": Option(1000, 1, 1_000_000, "tokens that a tool returns, on average"),
    "tool_time": Option(3.0, 0.0, 1e7, "seconds that a tool takes, on average"),
    "branch": Option(0.03, 0.0, 1.0, "how likely a step starts sub-agents"),
    "compact": Option(64_000, 100, 10_000_000, "tokens at which a context is compacted"),
    "summary": Option(1500, 1, 1_000_000, "tokens that stand for a compacted context, on average"),
    "idle": Option(60.0, 0.0, 1e7, "seconds between an agent's tasks, on average"),
}


@dataclass(frozen=True, slots=True)
class Spec:
    """A workload as the user asked for it."""

    kind: str
    options: Mapping[str, float]
    """Those that were given, each within its limits."""

    def __str__(self) -> str:
        """What ``parse_spec`` takes."""
        options = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.kind}:{options}" if options else self.kind


def is_spec(text: str) -> bool:
    """Whether ``text`` asks for a workload, rightly or not."""
    return text.partition(":")[0] in KINDS


def parse_spec(text: str) -> Spec:
    """Read ``KIND`` or ``KIND:NAME=NUMBER,NAME=NUMBER``, such as ``chat:requests=5000,seed=3``.

    Raises:
        TraceError: for an unknown kind or name, or a value that is none; names the nearest.
    """
    kind, colon, rest = text.partition(":")
    known = _known(kind, text)
    if not colon:
        return Spec(kind, MappingProxyType({}))
    options: dict[str, float] = {}
    for part in rest.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        if not (name and equals and value):
            raise TraceError(
                f"{text!r}: {part!r} is not NAME=NUMBER. Write, for example, "
                f"'{kind}:requests=5000,seed=3'."
            )
        if name in options:
            raise TraceError(f"{text!r}: {name!r} is there twice. Write it once.")
        options[name] = _parse(name, value, known.get(name))
    _check(kind, options)
    return Spec(kind, MappingProxyType(options))


def generate(
    kind: str,
    *,
    requests: float = 1000,
    seed: float = 0,
    tokens_per_block: float = 16,
    **options: float,
) -> Trace:
    """Make a workload; the same arguments make the same one, and more requests only add to it.

    Args:
        kind: a key of ``KINDS``.
        requests: how many.
        seed: a whole number from 0 up.
        tokens_per_block: tokens. 16 is what vLLM's block sizes are multiples of, so that no chunk
            ends within a block; more makes a trace of long prompts smaller.
        options: as ``KINDS[kind]`` has them, defaults included.

    Raises:
        TraceError: for an unknown kind or name, or a value out of its limits.
    """
    given = {"requests": requests, "seed": seed, "tokens_per_block": tokens_per_block, **options}
    known = _known(kind, kind)
    _check(kind, given)
    values = {name: option.default for name, option in known.items()} | given
    names = _Names(int(tokens_per_block))
    dice = _Dice(int(seed))
    made = list(islice(_WORKLOADS[kind](dice, values, names), int(requests)))
    begin = made[0].time
    name = str(Spec(kind, {k: v for k, v in given.items() if v != known[k].default}))
    return Trace(
        name,
        int(tokens_per_block),
        tuple(
            Request(round(it.time - begin, 6), it.prompt_tokens, it.answer_tokens, it.blocks)
            for it in made
        ),
    )


# --------------------------------------------------------------------------------------- options


def _known(kind: str, text: str) -> Mapping[str, Option]:
    found = KINDS.get(kind)
    if found is None:
        raise TraceError(
            f"{text!r}: there is no workload {kind!r}.{_near(kind, KINDS)} Write one of "
            f"{', '.join(KINDS)}."
        )
    return found


def _parse(name: str, value: str, option: Option | None) -> float:
    """The number that is written; whether it fits is for ``_check`` to say."""
    if re.fullmatch(r"[0-9]{1,20}", value):
        return int(value) if option is None or option.whole else float(value)
    if re.fullmatch(r"[0-9]{1,20}(\.[0-9]{1,20})?(e[+-]?[0-9]{1,3})?", value):
        return float(value)
    raise TraceError(
        f"{name}={value[:40]!r} is not a number. Write digits, such as 5000, or 0.5 where a "
        "fraction is allowed."
    )


def _check(kind: str, options: Mapping[str, float]) -> None:
    known = KINDS[kind]
    for name, value in options.items():
        option = known.get(name)
        if option is None:
            raise TraceError(
                f"{kind} has no option {name!r}.{_near(name, known)} Known are {', '.join(known)}."
            )
        number = not isinstance(value, bool) and isinstance(value, int | float)
        whole = isinstance(value, int)
        if not number or (option.whole and not whole) or not option.low <= value <= option.high:
            what = "a whole number" if option.whole else "a number"
            raise TraceError(
                f"{kind}: {name}={value!r} ({option.text}) has to be {what} from {option.low} to "
                f"{option.high}; write {name}={option.default}, for example."
            )


def _near(name: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


# ------------------------------------------------------------------------------------------ text


@dataclass(slots=True)
class _Names:
    """Hands out block ids."""

    tokens_per_block: int
    used: int = 0

    def take(self, count: int) -> range:
        """So many that nobody has had."""
        self.used += count
        return range(self.used - count, self.used)


@dataclass(frozen=True, slots=True)
class _Place:
    """Somewhere in a context that another one can go on from."""

    length: int
    tail: int
    """The id of the partial block that ends here; -1 if a whole one does."""


class _Context:
    """Text that grows at its end. What is added is new: nobody else has the same there."""

    def __init__(self, names: _Names) -> None:
        self.length = 0
        self._names = names
        self._whole = array("q")
        """Ids of the blocks that are full."""
        self._tail = -1
        """Of the partial block after them, once somebody has asked for it."""

    def add(self, tokens: int) -> None:
        """Append a new piece of text."""
        self.length += tokens
        missing = self.length // self._names.tokens_per_block - len(self._whole)
        self._whole.extend(self._names.take(missing))
        self._tail = -1

    def place(self) -> _Place:
        """Where the text ends now."""
        if self._tail < 0 and self.length % self._names.tokens_per_block:
            (self._tail,) = self._names.take(1)
        return _Place(self.length, self._tail)

    def branch(self, place: _Place | None = None) -> _Context:
        """Another context with the same text up to ``place``, one of this one's; all of it if none.

        The id of a partial block goes along, as both contexts have the same text there.
        """
        place = place or self.place()
        other = type(self)(self._names)
        other.length, other._tail = place.length, place.tail
        other._whole = self._whole[: place.length // self._names.tokens_per_block]
        return other

    def ask(self, time: float, answer: int) -> Request:
        """The request that has this text as its prompt."""
        blocks = self._whole[:]
        if (tail := self.place().tail) >= 0:
            blocks.append(tail)
        return Request(time, self.length, answer, blocks)


class _Dice:
    """Draws from few distributions, all by way of ``random()``.

    Python promises the same numbers for the same seed in all versions only for that method.
    """

    def __init__(self, seed: int) -> None:
        self.uniform = Random(seed).random

    def seconds(self, mean: float) -> float:
        """Exponential."""
        return -mean * math.log(1.0 - self.uniform())

    def tokens(self, mean: float, sigma: float = 1.0) -> int:
        """Log-normal, at least 1 and at most 20 times the mean."""
        normal = math.sqrt(-2.0 * math.log(1.0 - self.uniform())) * math.cos(
            2.0 * math.pi * self.uniform()
        )
        drawn = mean * math.exp(sigma * normal - sigma * sigma / 2)
        return max(1, round(min(drawn, 20 * mean)))

    def count(self, mean: float) -> int:
        """Geometric, at least 1."""
        if mean <= 1.0:
            return 1
        return 1 + int(math.log(1.0 - self.uniform()) / math.log(1.0 - 1.0 / mean))

    def zipf(self, count: int, exponent: float) -> Callable[[], int]:
        """From 0 to ``count`` - 1, the first ones most often."""
        sums = list(accumulate((n + 1) ** -exponent for n in range(count)))
        return lambda: min(bisect(sums, self.uniform() * sums[-1]), count - 1)


def _shared(dice: _Dice, o: Mapping[str, float], names: _Names) -> Callable[[], _Context]:
    """Draws one of the prompts that everybody starts from."""
    roots = []
    for _ in range(int(o["systems"])):
        root = _Context(names)
        root.add(dice.tokens(o["system_tokens"], 0.5))
        roots.append(root)
    draw = dice.zipf(len(roots), o["zipf"])
    return lambda: roots[draw()]


# ------------------------------------------------------------------------------------------ chat


def _chat(dice: _Dice, o: Mapping[str, float], names: _Names) -> Iterator[Request]:
    """People who ask, read, think, ask again, and start a new conversation some time later."""
    start = _shared(dice, o, names)
    talks: dict[int, tuple[_Context, int]] = {}
    """Of each user in a conversation: its text, and the turns that are left."""
    queue = [(dice.uniform() * (o["idle"] + o["think"]), user) for user in range(int(o["users"]))]
    heapify(queue)
    while True:
        time, user = heappop(queue)
        if user not in talks:
            talks[user] = start().branch(), dice.count(o["turns"])
        context, left = talks.pop(user)
        context.add(dice.tokens(o["question"]))
        answer = dice.tokens(o["answer"])
        yield context.ask(time, answer)
        context.add(answer)
        pause = o["idle"]
        if left > 1 and context.length < o["max_tokens"]:
            talks[user] = context, left - 1
            pause = o["think"]
        heappush(queue, (time + answer / o["speed"] + dice.seconds(pause), user))


# ---------------------------------------------------------------------------------------- agents


@dataclass(slots=True)
class _Agent:
    """Somebody at work on a task."""

    root: _Context
    """Instructions and tools."""
    context: _Context
    left: int
    """Steps until the task is done."""
    caller: _Agent | None = None
    places: list[_Place] = field(default_factory=list)
    """Where requests of the present context have ended."""
    waiting: int = 0
    """Sub-agents that are still at work."""


def _agents(dice: _Dice, o: Mapping[str, float], names: _Names) -> Iterator[Request]:
    """Agents that take many short steps over the same growing context.

    A step asks with everything so far, calls a tool, and goes on with what the tool returns. Now
    and then it starts one to three sub-agents, each from an earlier point of the context or from
    the instructions alone, and waits for the answers of all. A context that has grown too long is
    summarised by one last request and gives way to the instructions and that summary.
    """
    start = _shared(dice, o, names)
    numbers = iter(range(1 << 62))
    queue: list[tuple[float, int, _Agent]] = []

    def wake(agent: _Agent, time: float) -> None:
        heappush(queue, (time, next(numbers), agent))

    def begin(time: float) -> None:
        root = start()
        context = root.branch()
        context.add(dice.tokens(o["task"]))
        wake(_Agent(root, context, dice.count(o["steps"])), time)

    def call(agent: _Agent, time: float) -> None:
        agent.waiting = 1 + int(dice.uniform() * 3)
        for _ in range(agent.waiting):
            pick = int(dice.uniform() * 2 * len(agent.places))
            # As often from the instructions alone as from a point of the context.
            early = pick >= len(agent.places)
            context = agent.root.branch() if early else agent.context.branch(agent.places[pick])
            context.add(dice.tokens(o["task"]))
            wake(_Agent(agent.root, context, dice.count(max(1.0, o["steps"] / 3)), agent), time)

    for _ in range(int(o["agents"])):
        begin(dice.uniform() * (o["idle"] + o["tool_time"]))
    while True:
        time, _, agent = heappop(queue)
        if agent.places and agent.context.length >= o["compact"]:
            agent.context.add(dice.tokens(o["task"]))
            answer = dice.tokens(o["summary"])
            yield agent.context.ask(time, answer)
            agent.context = agent.root.branch()
            agent.context.add(answer)
            agent.places.clear()
            wake(agent, time + answer / o["speed"])
            continue
        answer = dice.tokens(o["answer"])
        yield agent.context.ask(time, answer)
        agent.places.append(agent.context.place())
        agent.context.add(answer)
        agent.left -= 1
        time += answer / o["speed"]
        caller = agent.caller
        if agent.left > 0:
            if caller is None and dice.uniform() < o["branch"]:
                call(agent, time)
            else:
                agent.context.add(dice.tokens(o["tool"]))
                wake(agent, time + dice.seconds(o["tool_time"]))
        elif caller is None:
            begin(time + dice.seconds(o["idle"]))
        else:
            caller.context.add(answer)
            caller.waiting -= 1
            if not caller.waiting:
                wake(caller, time)


_WORKLOADS: Mapping[str, Callable[[_Dice, Mapping[str, float], _Names], Iterator[Request]]] = {
    "chat": _chat,
    "agents": _agents,
}

KINDS: Mapping[str, Mapping[str, Option]] = MappingProxyType(
    {
        "chat": MappingProxyType(_COMMON | _CHAT),
        "agents": MappingProxyType(_COMMON | _AGENTS),
    }
)
"""The workloads, and the options that each takes."""
