"""The replay's page: its structure, that its numbers are the data's, and how a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from copy import deepcopy
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvloft.errors import KVLoftError
from kvloft.replay.report import html
from kvloft.units import format_size

GIB = 1 << 30
Result = dict[str, Any]


# --- results to show ------------------------------------------------------------------------------


def timeline(budget: int, points: int = 50) -> list[dict[str, Any]]:
    return [
        {
            "request": 100 * i,
            "time": 71.5 * i,
            "full_bytes": budget * i // (2 * points),
            "window_bytes": budget * i // (4 * points),
            "state_bytes": budget * i // (8 * points),
            "token_hit_rate": 0.3 * i / points,
        }
        for i in range(points)
    ]


def run(policy: str, system: str, budget: int, rate: float, **more: Any) -> dict[str, Any]:
    return {
        "policy": policy,
        "system": system,
        "budget_bytes": budget,
        "disk_bytes": 0,
        "token_hit_rate": rate,
        "tokens_restored": 31_380_032,
        "hit_requests": 5_386,
        "bytes_held": budget - GIB // 2,
        "bytes_stored": 7 * budget,
        "bytes_restored": 11 * budget,
        "resume_points_kept": 1_234,
        "resume_points_used": 567,
        "evicted_chunks": 45_678,
        "evicted_resume_points": 891,
        "prefill_seconds_saved": 4_980.0,
        "call_p50_ms": 0.0123,
        "call_p99_ms": 0.345,
        "call_p999_ms": 4.56,
        "call_max_ms": 78.9,
        "seconds": 23.4,
        "timeline": timeline(budget) if system == "kvloft" else None,
    } | more


def result(*runs: dict[str, Any], **more: Any) -> Result:
    entry = {
        "trace": {
            "name": "conversation",
            "requests": 12_031,
            "prompt_tokens": 98_123_456,
            "answer_tokens": 4_123_456,
            "tokens_per_block": 512,
            "seconds": 3_599.0,
        },
        "geometry": "gemma-4-31b",
        "tokens_per_chunk": 512,
        "engine_blocks": 0,
        "measured_from": 6_015,
        "everything": 0.398,
        "bounds": [
            {"budget_bytes": 4 * GIB, "token_hit_rate": 0.25, "kind": "optimum"},
            {"budget_bytes": 16 * GIB, "token_hit_rate": 0.35, "kind": "upper bound"},
        ],
        "runs": list(runs),
    }
    return {
        "benchmark": "replay",
        "version": "0.1.0",
        "time": "2026-12-03T12:00:00+00:00",
        "machine": {"processor": "some", "cores": 2},
        "traces": [entry | more],
    }


def usual() -> Result:
    return result(
        run("adaptive", "kvloft", 4 * GIB, 0.20),
        run("adaptive", "kvloft", 16 * GIB, 0.31),
        run("lru", "kvloft", 4 * GIB, 0.21),
        run("lru", "kvloft", 16 * GIB, 0.29),
        run("lru", "vllm", 4 * GIB, 0.12),
        run("lru", "vllm", 16 * GIB, 0.25),
        run("arc", "vllm", 4 * GIB, 0.14),
        run("arc", "vllm", 16 * GIB, 0.24),
    )


# --- a page, parsed -------------------------------------------------------------------------------

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that elements nest and collects what tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.templates = 0
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data.replace("\u00a0", " ")

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        return [
            found
            for name, found in self.elements
            if name == tag and attributes.items() <= found.items()
        ]

    def table(self, first: str) -> dict[str, list[str]]:
        """Rows of the first table whose corner is ``first``, by their heads."""
        table = next(table for table in self.tables if table[0][0] == first)
        return {row[0]: row[1:] for row in table}

    @property
    def words(self) -> str:
        text = re.sub(r"<(style|script|template)\b.*?</\1>", "", self.text, flags=re.DOTALL)
        return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", "", text)))


# --- structure ------------------------------------------------------------------------------------


def test_elements_nest_ids_are_unique_and_references_hold() -> None:
    two = usual()
    two["traces"].append(deepcopy(two["traces"][0]))
    page = Page(html(two))
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs in page.elements:
        targets = (attrs.get("aria-labelledby") or "").split()
        targets += [name for key in ("for", "data-place") if (name := attrs.get(key))]
        targets += [name.removeprefix("#") for name in [attrs.get("href")] if name]
        assert set(targets) <= set(ids), attrs
    assert [tag for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)] == [
        *("h1", "h2", "h3", "h3", "h3", "h2", "h3", "h3", "h3", "h2")
    ]
    drawings = page.all("svg", role="img")
    assert len(drawings) == 2 * (1 + 4)
    assert page.all("nav")


def test_nothing_is_fetched() -> None:
    text = html(usual())
    page = Page(text)
    assert "://" not in text
    assert not re.search(r"@import|url\(|srcset|\bfetch\b", text)
    for tag, attrs in page.elements:
        assert tag not in ("link", "img", "iframe", "object")
        assert "src" not in attrs
        assert (attrs.get("href") or "#").startswith("#")
    assert "default-src 'none'" in text


def test_names_are_text_and_never_markup() -> None:
    evil = """</title><script>alert("1")</script>'&amp;"""
    data = result(
        run(evil, "kvloft", 4 * GIB, 0.2),
        run("lru", evil, 4 * GIB, 0.2),
        geometry=evil,
        bounds=[{"budget_bytes": 4 * GIB, "token_hit_rate": 0.25, "kind": evil}],
    )
    data["traces"][0]["trace"]["name"] = evil
    data["machine"] = {evil: evil}
    data["version"] = data["time"] = evil
    text = html(data)
    page = Page(text)
    assert len(page.all("script")) == 1
    assert "alert(" in text
    assert evil not in text
    assert f"Replay of {evil}" in page.words
    assert text.count(escape(evil)) > 10


@pytest.mark.parametrize("other", [{}, {"benchmark": "disk"}, {"benchmark": "replay"}])
def test_other_results_are_refused(other: Result) -> None:
    with pytest.raises(KVLoftError, match="no result of `kvloft replay`"):
        html(other)


# --- numbers --------------------------------------------------------------------------------------


def test_words_say_what_was_replayed_and_who_is_best() -> None:
    words = Page(html(usual())).words
    assert "Replay of conversation" in words
    assert "conversation on gemma-4-31b" in words
    assert "3 December 2026, 12:00 UTC" in words
    assert "12,031 requests in 59 min 59 s with 98,123,456 prompt tokens" in words
    assert "The first 6,015 requests fill the cache" in words
    assert "restores 1.24 to 1.50 times what vLLM’s best does" in words
    assert "reaches 84.0 % to 88.6 % of the optimum or upper bound" in words
    assert "If everything were kept for ever, 39.8 % of the prompt tokens" in words
    assert (
        "With 4.00 GiB, KVLoft lru: 21.0 % of the prompt tokens. That is 1.50 times vLLM’s best "
        "(arc, 14.0 %) and 4.0 points below the optimum of 25.0 %."
    ) in words
    assert (
        "With 16.0 GiB, KVLoft adaptive: 31.0 % of the prompt tokens. That is 1.24 times vLLM’s "
        "best (lru, 25.0 %) and 4.0 points below the upper bound of 35.0 %."
    ) in words


def test_hit_rates_in_table_and_chart_are_the_data_s() -> None:
    data = usual()
    text = html(data)
    rows = Page(text).table("Policy")
    assert rows["Policy"] == ["4.00 GiB", "16.0 GiB"]
    assert rows["KVLoft adaptive"] == ["20.0 %", "31.0 %"]
    assert rows["KVLoft lru"] == ["21.0 %", "29.0 %"]
    assert rows["vLLM arc"] == ["14.0 %", "24.0 %"]
    assert rows["bound"] == ["25.0 %optimum", "35.0 %upper bound"]
    assert rows["everything kept"] == ["39.8 %", "39.8 %"]
    assert "<b>21.0\u00a0%</b>" in text
    assert "<b>31.0\u00a0%</b>" in text
    # The axis of shares ends at 40 %, that of sizes a tenth of a power of two beyond both sizes.
    for share, title in [(0.31, "KVLoft adaptive, 16.0 GiB"), (0.14, "vLLM arc, 4.00 GiB")]:
        x = (2.1 if "16" in title else 0.1) / 2.2
        mark = rf'x="{x:.2%}" y="{1 - share / 0.4:.2%}" class="[^"]*"><title>{title}: '
        assert re.search(mark, text.replace("\u00a0", " ")), mark


def test_vllm_s_lines_are_dashed_and_hollow_and_no_two_lines_look_alike() -> None:
    runs = [
        run(f"policy {i}", system, size * GIB, 0.01 * i)
        for i in range(12)
        for system in ("kvloft", "vllm")
        for size in (4, 16)
    ]
    page = Page(html(result(*runs)))
    lines = [style for a in page.all("path") if "series" in (style := a.get("class") or "")]
    marks = page.all("use", x="18")
    looks = {(mark["href"], mark["class"], line) for mark, line in zip(marks, lines, strict=True)}
    assert len(looks) == 24
    for index, (mark, line) in enumerate(zip(marks, lines, strict=True)):
        theirs = index % 2 == 1
        assert ("hollow" in (mark["class"] or "")) is theirs
        assert ("d0" not in line) is theirs


def test_every_number_of_a_run_is_in_the_table() -> None:
    row = Page(html(usual())).table("Policy, size")["KVLoft adaptive 16.0 GiB"]
    assert row == [
        *("31.0 %", "31,380,032", "5,386", "176 GiB", "1 h 23 min", "112 GiB", "15.5 GiB"),
        *("1,234", "567", "891", "45,678", "0.012", "0.345", "4.56", "78.9", "23.4 s"),
    ]


@pytest.mark.parametrize("absent", ["missing", "null"])
def test_absent_values_are_dashes(absent: str) -> None:
    needed = {"policy", "system", "budget_bytes", "token_hit_rate"}
    full = run("lru", "vllm", 4 * GIB, 0.2)
    sparse = {key: value for key, value in full.items() if key in needed}
    if absent == "null":
        sparse |= dict.fromkeys(full.keys() - needed)
    page = Page(html(result(sparse, everything=None, bounds=[])))
    row = page.table("Policy, size")["vLLM lru 4.00 GiB"]
    assert row == ["20.0 %"] + ["–"] * 15
    assert "No timeline was recorded." in page.words
    assert list(page.table("Policy")) == ["Policy", "vLLM lru"]
    assert "for ever" not in page.words
    assert not page.all("select")


def test_optional_parts_of_a_result_may_be_absent() -> None:
    entry = {
        "trace": {"name": "a"},
        "geometry": "b",
        "runs": [run("lru", "kvloft", GIB, 0.5)],
    }
    page = Page(html({"benchmark": "replay", "traces": [entry]}))
    assert "Replay of a" in page.words
    assert "Machine" not in page.words
    assert "Nothing was run." in Page(html(result())).words
    assert "Replay of nothing" in Page(html({"benchmark": "replay", "traces": []})).words


def test_zero_hit_rates_and_one_size() -> None:
    data = result(
        run("lru", "kvloft", 20 * 10**9, 0.0),
        run("lru", "vllm", 20 * 10**9, 0.0),
        everything=0.0,
        bounds=[{"budget_bytes": 20 * 10**9, "token_hit_rate": 0.0, "kind": "optimum"}],
    )
    page = Page(html(data))
    assert (
        "With 18.6 GiB, KVLoft lru: 0.0 % of the prompt tokens; vLLM’s best (lru): 0.0 %. "
        "That is at the optimum of 0.0 %."
    ) in page.words
    assert page.table("Policy")["Policy"] == ["18.6 GiB"]
    marks = [use for use in page.all("use") if use["x"] == "50.00%"]
    assert len(marks) == 3
    assert {use["y"] for use in marks} == {"100.00%"}


def test_disks_are_lines_of_their_own_and_compared_among_themselves() -> None:
    data = result(
        run("lru", "kvloft", 4 * GIB, 0.2),
        run("lru", "kvloft", 4 * GIB, 0.3, disk_bytes=512 * GIB),
        run("lru", "vllm", 4 * GIB, 0.1),
    )
    page = Page(html(data))
    assert page.table("Policy")["KVLoft lru + 512 GiB disk"][0] == "30.0 %"
    assert "optimum or upper bound (memory alone)" in page.words
    assert (
        "With 4.00 GiB and 512 GiB of disk, KVLoft lru + 512 GiB disk: 30.0 % of the prompt tokens."
    ) in page.words
    assert "2.00 times vLLM’s best (lru, 10.0 %)" in page.words


# --- memory over time -----------------------------------------------------------------------------


def test_the_chosen_timeline_is_the_largest_of_kvloft_s_first_policy() -> None:
    page = Page(html(usual()))
    (chosen,) = [a for a in page.all("option") if "selected" in a]
    assert "KVLoft adaptive, 16.0\u00a0GiB</option>" in page.text
    assert chosen["value"] == "s0-m0-1"
    assert len(page.all("option")) == 4
    assert [a["id"] for a in page.all("template")] == ["s0-m0-0", "s0-m1-0", "s0-m1-1"]
    assert page.words.count("budget, 16.0 GiB") == 1


def shape(page: Page, style: str) -> list[tuple[int, int]]:
    """The first area of that class: its upper edge, then its lower one backwards."""
    d = page.all("path", **{"class": style})[0]["d"]
    assert d
    pairs = [pair.split(",") for pair in d.strip("Mz").split("L")]
    return [(int(x), int(y)) for x, y in pairs]


def test_areas_are_stacked_to_scale() -> None:
    data = usual()
    page = Page(html(data))
    points = data["traces"][0]["runs"][1]["timeline"]
    assert len(points) == 50
    top = 16 * GIB * 1.04
    below = [0.0] * 50
    for style, key in [
        ("full", "full_bytes"),
        ("window", "window_bytes"),
        ("state", "state_bytes"),
    ]:
        above = [low + point[key] for low, point in zip(below, points, strict=True)]
        outline = shape(page, style)
        assert len(outline) == 100
        for edge, sums in [(outline[:50], above), (outline[:49:-1], below)]:
            for (x, y), point, total in zip(edge, points, sums, strict=True):
                assert x == round(1000 * point["time"] / points[-1]["time"])
                assert abs(y - (1000 - 1000 * total / top)) <= 0.5
        below = above
    rows = page.table("Request")
    last = points[-1]
    assert rows["4,900"] == [
        "58 min 24 s",
        *(format_size(last[key]) for key in ("full_bytes", "window_bytes", "state_bytes")),
        format_size(below[-1]),
        "29.4 %",
    ]
    assert len(rows) == 51


@pytest.mark.parametrize(
    "points",
    [
        [{"request": 5, "time": 1.5, "full_bytes": GIB}],
        [{"full_bytes": GIB}, {"full_bytes": None}, {}],
        [{"request": i, "time": None, "state_bytes": i * GIB} for i in range(5)],
        [{"request": 3, "time": 0.0, "full_bytes": 0, "window_bytes": 0, "state_bytes": 0}] * 2,
        [{"request": i, "time": 1e7 * i, "full_bytes": 9 * GIB} for i in range(3)],
        [{"request": i, "time": 1e-3 * i, "full_bytes": 1} for i in range(3)],
    ],
)
def test_timelines_of_any_kind_can_be_drawn(points: Sequence[dict[str, Any]]) -> None:
    page = Page(html(result(run("lru", "kvloft", 4 * GIB, 0.2, timeline=points))))
    assert len(page.all("svg", role="img")) == 2
    assert "nan" not in page.text
    for drawn in page.all("path"):
        numbers = (
            [int(n) for n in re.findall(r"-?\d+", drawn["d"] or "")] if "class" in drawn else []
        )
        assert all(0 <= n <= 1000 for n in numbers)


# --- in a browser ---------------------------------------------------------------------------------

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=5000",
    "--window-size=1400,1800",
)

HARNESS = """<!DOCTYPE html><meta charset="utf-8"><body><script>
const page = PAGE;
const seen = {};
const size = (e) => { const box = e.getBoundingClientRect(); return [box.width, box.height]; };
function look(frame) {
  const page = frame.contentDocument, root = page.documentElement;
  const select = page.querySelector("select");
  const figure = () => page.getElementById(select.dataset.place).querySelector("figure");
  const before = figure().querySelector("figcaption").textContent;
  figure().querySelector("details").open = true;
  select.value = select.options[0].value;
  select.dispatchEvent(new frame.contentWindow.Event("change"));
  return {
    inner: frame.contentWindow.innerWidth, scroll: root.scrollWidth,
    charts: [...page.querySelectorAll("svg[role=img], svg.plot")].map(size),
    texts: [...page.querySelectorAll("svg[role=img] > text")].map(
      (e) => [e.getBoundingClientRect().left, e.getBoundingClientRect().right]),
    chooser: size(select), before, after: figure().querySelector("figcaption").textContent,
    open: figure().querySelector("details").open,
  };
}
for (const [width, height] of [[360, 740], [1280, 900]]) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:${height}px;border:0`;
  frame.srcdoc = page;
  frame.onload = () => {
    seen[width] = look(frame);
    const out = document.createElement("pre");
    out.textContent = JSON.stringify(seen);
    document.querySelectorAll("pre").forEach((e) => e.remove());
    document.body.append(out);
  };
  document.body.append(frame);
}
</script></body>"""


def browse(page: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """What a phone and a desktop show of the page, and what the console says."""
    if CHROMIUM is None:
        raise RuntimeError("no Chromium on PATH")
    # The slashes keep the page's own closing tags from ending the script that holds it.
    harness = HARNESS.replace("PAGE", json.dumps(page).replace("</", "<\\/"))
    (folder / "look.html").write_text(harness, encoding="utf-8")
    done = subprocess.run(
        [
            *(CHROMIUM, *OPTIONS, f"--user-data-dir={folder / 'profile'}"),
            *("--dump-dom", (folder / "look.html").as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r"<pre>(\{.*\})</pre>", done.stdout)
    assert found, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(unescape(found[1])), console


def busy() -> Result:
    """Long names, many policies and sizes, two sections."""
    runs: Iterator[dict[str, Any]] = (
        run(f"policy-with-a-long-name-{i}", system, (1 << power) * GIB, 0.02 * power)
        for i in range(5)
        for system in ("kvloft", "vllm")
        for power in range(10)
    )
    data = result(*runs, geometry="a_geometry_with_one_very_long_identifier_and_no_space_in_it")
    data["traces"] += usual()["traces"]
    return data


@pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(BROWSERS)} is on PATH")
@pytest.mark.parametrize("data", [usual(), busy()], ids=["usual", "busy"])
def test_a_phone_and_a_desktop_show_it(data: Result, tmp_path: Path) -> None:
    seen, console = browse(html(data), tmp_path)
    assert console == []
    assert seen.keys() == {"360", "1280"}
    for width, page in seen.items():
        assert page["inner"] == int(width)
        assert page["scroll"] <= page["inner"]
        assert len(page["charts"]) == 4 * len(data["traces"])
        for wide, high in page["charts"]:
            assert wide > 200
            assert high > 150
        for left, right in page["texts"]:
            assert left >= 0
            assert right <= page["inner"]
        assert min(page["chooser"]) > 10
        assert page["before"] != page["after"]
        assert page["open"] is True
