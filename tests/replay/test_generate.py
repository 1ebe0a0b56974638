"""Generated workloads: what ids promise, what a seed promises, and what options do."""

from __future__ import annotations

import re
from collections import Counter
from itertools import count, pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvloft.replay.generate as module
from kvloft.errors import TraceError
from kvloft.replay.generate import KINDS, Spec, generate, is_spec, parse_spec
from kvloft.replay.trace import Request, Trace, boundary_ids

SMALL: dict[str, dict[str, float]] = {
    "chat": {
        "users": 4, "systems": 3, "system_tokens": 12, "question": 5, "answer": 7,
        "max_tokens": 150,
    },
    "agents": {
        "agents": 2, "systems": 2, "system_tokens": 20, "task": 5, "steps": 8.0, "answer": 4,
        "tool": 6, "branch": 0.2, "compact": 100, "summary": 10,
    },
}  # fmt: skip


class Written(module._Context):
    """A context that has tokens: every piece of text is made of new ones."""

    fresh: ClassVar[Any] = count()
    asked: ClassVar[list[tuple[Request, tuple[int, ...]]]] = []

    def __init__(self, names: module._Names) -> None:
        super().__init__(names)
        self.tokens: list[int] = []

    def add(self, tokens: int) -> None:
        super().add(tokens)
        self.tokens += [next(Written.fresh) for _ in range(tokens)]

    def branch(self, place: module._Place | None = None) -> Written:
        other = super().branch(place)
        assert isinstance(other, Written)
        other.tokens = self.tokens[: other.length]
        return other

    def ask(self, time: float, answer: int) -> Request:
        request = super().ask(time, answer)
        Written.asked.append((request, tuple(self.tokens)))
        return request


def written(kind: str, **options: float) -> tuple[Trace, list[tuple[int, ...]]]:
    """A small workload, and its prompts as tokens."""
    Written.asked.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_Context", Written)
        trace = generate(kind, **SMALL[kind], **options)
    return trace, [tokens for _, tokens in Written.asked[: len(trace.requests)]]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), size=st.sampled_from([1, 3, 4, 16, 64]))
def test_ids_are_equal_where_prefixes_are(kind: str, seed: int, size: int) -> None:
    trace, prompts = written(kind, requests=60, seed=seed, tokens_per_block=size)
    names: dict[tuple[int, ...], int] = {}
    for request, tokens in zip(trace.requests, prompts, strict=True):
        assert request.prompt_tokens == len(tokens)
        assert len(request.blocks) == -(-len(tokens) // size)
        for n, name in enumerate(request.blocks):
            assert names.setdefault(tokens[: (n + 1) * size], name) == name
    assert len(set(names.values())) == len(names)
    for chunk in (size, 2 * size):  # a chunk that ends with a block: shared whenever it is equal
        ends: dict[tuple[int, ...], int] = {}
        for request, tokens in zip(trace.requests, prompts, strict=True):
            for n, name in enumerate(boundary_ids(request, size, chunk), 1):
                assert ends.setdefault(tokens[: n * chunk], name) == name
        assert len(set(ends.values())) == len(ends)


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from("abp"), st.integers(0, 20), st.integers(0, 7)), max_size=25),
)
def test_contexts_keep_the_promise_however_they_branch(
    size: int, steps: list[tuple[str, int, int]]
) -> None:
    """Also where a branch is asked with before anything has been added to it."""
    Written.asked.clear()
    first = Written(module._Names(size))
    first.add(5)
    contexts = [(first, [first.place()])]
    for what, which, number in steps:
        context, places = contexts[which % len(contexts)]
        if what == "a":
            context.add(number + 1)
        elif what == "p":
            places.append(context.place())
        else:
            place = places[number % len(places)]
            contexts.append((context.branch(place), [place]))
        for each, _ in contexts:
            each.ask(0.0, 1)
    names: dict[tuple[int, ...], int] = {}
    for request, tokens in Written.asked:
        for n, name in enumerate(request.blocks):
            assert names.setdefault(tokens[: (n + 1) * size], name) == name
    assert len(set(names.values())) == len(names)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), requests=st.integers(1, 80))
def test_a_seed_makes_one_trace_and_more_requests_add_to_it(
    kind: str, seed: int, requests: int
) -> None:
    trace = generate(kind, seed=seed, requests=requests, **SMALL[kind])
    longer = generate(kind, seed=seed, requests=100, **SMALL[kind])
    assert len(trace.requests) == requests
    assert trace.requests == longer.requests[:requests]
    assert trace.requests[0].time == 0.0
    assert all(a.time <= b.time for a, b in pairwise(trace.requests))
    assert all(it.prompt_tokens > 0 and it.answer_tokens > 0 for it in trace.requests)
    other = generate(kind, seed=seed + 1, requests=100, **SMALL[kind])
    assert other.requests != longer.requests


def test_a_chat_goes_on_from_history_and_answer() -> None:
    """With one user and one system prompt, each prompt extends the last or starts anew."""
    trace = generate(
        "chat", requests=300, users=1, systems=1, turns=4.0, tokens_per_block=1, seed=5
    )
    root = trace.requests[0].blocks
    begun = 1
    for before, after in pairwise(trace.requests):
        shared = sum(1 for a, b in zip(before.blocks, after.blocks, strict=False) if a == b)
        if shared == before.prompt_tokens:
            assert after.prompt_tokens > before.prompt_tokens + before.answer_tokens
        else:
            begun += 1
            assert after.blocks[:shared] == root[:shared]
            assert shared > 100
        assert after.time >= before.time + before.answer_tokens / 50 - 1e-5
    assert 50 < begun < 110


def test_system_prompts_are_popular_by_zipf() -> None:
    trace = generate("chat", requests=4000, turns=1.0, systems=10, tokens_per_block=1, seed=1)
    uses = Counter(request.blocks[0] for request in trace.requests)
    ranked = [n for _, n in uses.most_common()]
    assert len(ranked) == 10
    assert 1.6 < ranked[0] / ranked[1] < 2.5
    flat = generate("chat", requests=4000, turns=1.0, systems=10, zipf=0.0, seed=1)
    assert max(Counter(it.blocks[0] for it in flat.requests).values()) < 500


def test_a_conversation_ends_when_it_is_long() -> None:
    trace = generate("chat", requests=300, turns=1e4, max_tokens=2000, system_tokens=100)
    assert max(it.prompt_tokens for it in trace.requests) < 2000 + 20 * 150
    longer = generate("chat", requests=3000, turns=1e4, users=10, system_tokens=100)
    assert max(it.prompt_tokens for it in longer.requests) > 20_000


def test_agents_extend_branch_and_compact() -> None:
    """Prompts go on from the newest, from an earlier one, or from the instructions alone."""
    _, prompts = written("agents", requests=600, seed=2)
    kinds = Counter[str]()
    for n, tokens in enumerate(prompts):
        before = prompts[:n]
        parent = max((it for it in before if it == tokens[: len(it)]), key=len, default=())
        shared = max((common(it, tokens) for it in before), default=0)
        if not shared:
            kinds["first"] += 1
        elif not parent:
            kinds["instructions"] += 1
        elif any(len(it) > len(parent) and it[: len(parent)] == parent for it in before):
            kinds["earlier"] += 1
        else:
            kinds["newest"] += 1
    assert kinds["first"] == 2  # as many as there are sets of instructions
    assert kinds["instructions"] > 30
    assert kinds["earlier"] > 10
    assert kinds["newest"] > 300
    # A context of 100 tokens or more is asked with once at most, and a request adds little.
    assert max(map(len, prompts)) < 100 + 20 * (4 + 6 + 5)


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))


def test_agents_without_branches_or_compaction_only_extend() -> None:
    options: dict[str, float] = {"agents": 1, "branch": 0.0, "compact": 10_000_000, "systems": 1}
    trace = generate("agents", requests=300, tokens_per_block=1, steps=30.0, **options)
    restarts = sum(
        after.blocks[: len(before.blocks)] != before.blocks
        for before, after in pairwise(trace.requests)
    )
    assert 3 < restarts < 20


# ---------------------------------------------------------------------------------- specs


def test_a_spec_says_what_generate_makes() -> None:
    spec = parse_spec("chat: requests = 50 , seed=3,think=1.5,zipf=1")
    assert spec == Spec("chat", {"requests": 50, "seed": 3, "think": 1.5, "zipf": 1.0})
    trace = generate(spec.kind, **spec.options)
    assert trace == generate("chat", requests=50, seed=3, think=1.5)
    assert trace.name == "chat:requests=50,seed=3,think=1.5"
    assert generate("agents", requests=1000, seed=0).name == "agents"
    assert parse_spec("agents") == Spec("agents", {})
    assert [is_spec(it) for it in ("chat", "chat:x", "chat.jsonl", "")] == [
        True,
        True,
        False,
        False,
    ]


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    kind = draw(st.sampled_from(sorted(KINDS)))
    names = draw(st.lists(st.sampled_from(sorted(KINDS[kind])), unique=True))
    options: dict[str, float] = {}
    for name in names:
        option = KINDS[kind][name]
        if option.whole:
            options[name] = draw(st.integers(int(option.low), int(option.high)))
        else:
            options[name] = draw(st.floats(option.low, option.high)) + 0.0
    return Spec(kind, options)


@given(specs())
def test_specs_are_read_as_they_are_shown(spec: Spec) -> None:
    assert parse_spec(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chats:requests=5", "Did you mean 'chat'?"),
        ("", "chat, agents"),
        ("chat:", "NAME=NUMBER"),
        ("chat:requests", "'requests' is not NAME=NUMBER"),
        ("chat:requests=", "NAME=NUMBER"),
        ("chat:=5", "NAME=NUMBER"),
        ("chat:requests=5,", "NAME=NUMBER"),
        ("chat:request=5", "Did you mean 'requests'?"),
        ("chat:user=5", "Did you mean 'users'?"),
        ("chat:agents=5", "no option 'agents'"),
        ("agents:branches=0.5", "Did you mean 'branch'?"),
        ("chat:requests=5,requests=5", "twice"),
        ("chat:requests=five", "'five' is not a number"),
        ("chat:requests=-5", "'-5' is not a number"),
        ("chat:requests=1_000", "is not a number"),
        ("chat:requests=٣", "is not a number"),
        ("chat:requests=" + "9" * 5000, "is not a number"),
        ("chat:think=nan", "'nan' is not a number"),
        ("chat:requests=0", "from 1 to 10000000"),
        ("chat:requests=1.5", "a whole number"),
        ("chat:requests=5=6", "'5=6' is not a number"),
        ("chat:think=1e999", "from 0.0"),
        ("agents:branch=1.5", "from 0.0 to 1.0"),
        ("chat:requests=99999999", "from 1 to 10000000"),
    ],
)
def test_wrong_specs_are_refused(text: str, words: str) -> None:
    with pytest.raises(TraceError) as caught:
        parse_spec(text)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [True, None, "5", 1.5, float("nan"), -1, 0])
def test_wrong_arguments_are_refused(value: Any) -> None:
    for kind in KINDS:
        with pytest.raises(TraceError, match="requests="):
            generate(kind, requests=value)
    with pytest.raises(TraceError, match="Did you mean 'agents'"):
        generate("agent", requests=5)
    with pytest.raises(TraceError, match="Did you mean 'users'"):
        generate("chat", usres=5)


def test_the_docs_have_every_option_and_its_default() -> None:
    text = (Path(__file__).parents[2] / "docs" / "traces.md").read_text(encoding="utf-8")
    made = text.partition("## Traces made from a seed")[2]
    common_ones, _, rest = made.partition("### `chat`")
    sections = dict(zip(("chat", "agents"), rest.split("### `agents`"), strict=True))
    assert set(sections) == set(KINDS)
    for kind, options in KINDS.items():
        rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", common_ones + sections[kind], re.M)
        assert rows == [(name, f"{option.default:.12g}") for name, option in options.items()]
