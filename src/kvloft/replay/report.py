"""A replay's result as one HTML file that needs nothing else: charts, tables and what they say.

Charts are SVG whose parts are placed by shares of its width and height: points of a path in a
nested ``<svg>`` of 1,000 by 1,000 units that is stretched, everything else by percentages. So one
drawing fits a phone and a desktop while text, strokes and markers keep their size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, TypeGuard

from kvloft.errors import KVLoftError
from kvloft.units import format_size

Json = Mapping[str, Any]
Point = tuple[float, float]
"""Shares of a plot's width, from the left, and height, from the bottom."""

_DASH = "–"
_SYSTEMS = {"kvloft": "KVLoft", "vllm": "vLLM"}
_COLOURS = 6
_DASHES = 3
_MARKERS = (
    "M-4.5,0a4.5,4.5 0 1,0 9,0a4.5,4.5 0 1,0 -9,0z",
    "M-4,-4h8v8h-8z",
    "M0,-5.5L5,4H-5z",
    "M0,-6L5.5,0L0,6L-5.5,0z",
    "M0,5.5L5,-4H-5z",
    "M-1.7,-5.2h3.4v3.5h3.5v3.4h-3.5v3.5h-3.4v-3.5h-3.5v-3.4h3.5z",
    "M-3,-5L3,-5L5.5,0L3,5L-3,5L-5.5,0z",
)
_CLASSES = (
    ("full_bytes", "full", "full attention"),
    ("window_bytes", "window", "windows"),
    ("state_bytes", "state", "states"),
)


def html(result: Json) -> str:
    """The page for a result of ``kvloft replay`` (plain JSON values).

    Of a run only ``policy``, ``system``, ``budget_bytes`` and ``token_hit_rate`` are needed;
    whatever else is absent or null is shown as a dash. Raises ``KVLoftError`` for anything that is
    no result of a replay.
    """
    if result.get("benchmark") != "replay" or not isinstance(result.get("traces"), list):
        raise KVLoftError("this is no result of `kvloft replay`: write one with its option --json")
    sections = [_Section(f"s{index}", entry) for index, entry in enumerate(result["traces"])]
    names = ", ".join(dict.fromkeys(section.trace for section in sections)) or "nothing"
    page = Template(_asset("report.html"))
    return page.substitute(
        title=escape(f"Replay of {names} – KVLoft"),
        style=_asset("report.css"),
        script=_asset("report.js"),
        body="\n".join(_body(result, names, sections)),
    )


def _asset(name: str) -> str:
    return files("kvloft.replay").joinpath(name).read_text(encoding="utf-8")


# --- numbers as people read them ------------------------------------------------------------------


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shown(formatted: Callable[[Any], str]) -> Callable[[object], str]:
    """``formatted``, with a dash for what is not there and no break between number and unit."""
    return lambda value: formatted(value).replace(" ", "\u00a0") if _is_number(value) else _DASH


def _percent_text(share: float) -> str:
    return f"{share * 100:.{2 if 0 < abs(share) < 0.01 else 1}f} %"


def _short_text(value: float) -> str:
    """Three significant digits, or all of a whole part that is longer."""
    size = abs(value)
    return (
        f"{value:,.{0 if size >= 100 or not size else 1 if size >= 10 else 2 if size >= 1 else 3}f}"
    )


def _duration_text(seconds: float) -> str:
    if seconds < 60:
        return f"{_short_text(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


_count = _shown(lambda value: f"{value:,.0f}")
_percent = _shown(_percent_text)
_size = _shown(format_size)
_short = _shown(_short_text)
_duration = _shown(_duration_text)


def _tick_size(size: float) -> str:
    """``1 GiB`` where ``format_size`` says ``1.00 GiB``, and ``0`` without a unit."""
    text = format_size(size) if size else "0"
    return re.sub(r"\.?0+ ", " ", text) if "." in text else text


def _span(values: Iterable[float], text: Callable[[float], str]) -> str:
    low, high = text(min(values := list(values))), text(max(values))
    return low if low == high else f"{low} to {high}"


# --- axes -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Axis:
    """A linear scale from ``low`` to ``high`` and what is written along it."""

    name: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]

    def share(self, value: float) -> float:
        """Where ``value`` lies: 0 at the low end, 1 at the high end."""
        return (value - self.low) / (self.high - self.low)


def _steps(high: float, step: float, text: Callable[[float], str]) -> list[tuple[float, str]]:
    return [(step * i, text(step * i)) for i in range(int(high / step + 1e-9) + 1)]


def _share_axis(name: str, top: float) -> _Axis:
    """Per cent from 0 to a round number above ``top``, in about five steps of 1, 2 or 5."""
    top = top or 0.1
    power = 10.0 ** math.floor(math.log10(top / 5))
    step = next(f * power for f in (1, 2, 5, 10) if f * power * 5 >= top * 0.999)
    high = step * math.ceil(top / step - 1e-9)
    return _Axis(name, 0, high, _steps(high, step, lambda value: f"{value * 100:.6g} %"))


def _byte_axis(name: str, top: float) -> _Axis:
    """Bytes from 0 to a little above ``top``, in steps that are powers of two."""
    step = 2.0 ** math.ceil(math.log2(max(top, 1.0) / 5))
    return _Axis(name, 0, max(top, 1.0) * 1.04, _steps(max(top, 1.0) * 1.04, step, _tick_size))


def _log_axis(name: str, sizes: Sequence[int]) -> _Axis:
    """Logarithms to base two of sizes in bytes; the ends leave room for half a marker."""
    low, high = math.log2(min(sizes)), math.log2(max(sizes))
    room = max((high - low) * 0.04, 0.1)
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    every = max(1, math.ceil((last - first) / 6))
    ticks = [(float(power), _tick_size(2.0**power)) for power in range(first, last + 1, every)]
    if len(ticks) < 2:
        ends = dict.fromkeys([min(sizes), max(sizes)])
        ticks = [(math.log2(size), _tick_size(size)) for size in ends]
        if len(ticks) == 2 and high - low < 0.2:
            ticks.pop()
    return _Axis(name, low - room, high + room, ticks)


def _numbers(points: Iterable[Json], key: str) -> list[float] | None:
    """The values under ``key``, or nothing if they are not all numbers that differ somewhere."""
    values = [point.get(key) for point in points]
    numbers = [float(value) for value in values if _is_number(value)]
    return numbers if len(numbers) == len(values) and min(numbers) < max(numbers) else None


def _time_axis(points: Sequence[Json]) -> tuple[_Axis, list[float]]:
    """The axis of a timeline and the points' places on it: their times, else their requests."""
    if values := _numbers(points, "time"):
        name = "time since the trace began"
        units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
        unit, word = next(((u, w) for u, w in units if max(values) >= 2 * u), units[-1])
    else:
        name, unit, word = "request", 1, ""
        values = _numbers(points, "request") or [float(index) for index in range(len(points))]
    low, high = min(values), max(values)
    if low == high:
        return _Axis(name, low - 1, low + 1, [(low, f"{low / unit:,.0f} {word}".strip())]), values
    rough = (high - low) / unit / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(f * power for f in (1, 2, 5, 10) if f * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    ticks = [
        (step * i, f"{step * i / unit:,.6g} {word}".strip())
        for i in range(first, math.floor(high / step + 1e-9) + 1)
    ]
    return _Axis(name, low, high, ticks), values


# --- drawings -------------------------------------------------------------------------------------


def _path(points: Iterable[Point], classes: str, *, closed: bool = False) -> str:
    """A line, or a closed shape, through shares of the plot's width and height."""
    d = "L".join(f"{round(x * 1000)},{round(1000 - y * 1000)}" for x, y in points)
    return f'<path class="{classes}" d="M{d}{"z" if closed else ""}"/>'


def _mark(x: float, y: float, symbol: str, classes: str, title: str) -> str:
    return (
        f'<use href="#{symbol}" x="{x:.2%}" y="{1 - y:.2%}" class="{classes}">'
        f"<title>{escape(title)}</title></use>"
    )


def _chart(
    ident: str, title: str, summary: str, x: _Axis, y: _Axis, paths: list[str], marks: list[str]
) -> str:
    """The drawing: grid and ticks, then lines and areas, then markers on top."""
    grid, labels = [], []
    for value, text in y.ticks:
        at = f'y{{}}="{1 - y.share(value):.2%}"'
        grid.append(f'<line x2="100%" {at.format(1)} {at.format(2)}/>')
        labels.append(
            f'<text x="0" dx="-0.6em" dy="0.35em" {at.format("")} text-anchor="end">{text}</text>'
        )
    for index, (value, text) in enumerate(x.ticks):
        at = f'x="{x.share(value):.2%}"'
        spare = ' class="spare"' if index % 2 and len(x.ticks) > 4 else ""
        labels.append(f'<text {at} y="100%" dy="1.5em" text-anchor="middle"{spare}>{text}</text>')
    labels.append(f'<text x="-4em" y="0" dy="-1em">{y.name}</text>')
    labels.append(f'<text x="100%" y="100%" dy="3em" text-anchor="end">{x.name}</text>')
    return (
        f'<div class="chart"><svg role="img" width="100%" height="100%" '
        f'aria-labelledby="{ident}-t {ident}-d">'
        f'<title id="{ident}-t">{escape(title)}</title>'
        f'<desc id="{ident}-d">{escape(summary)}</desc>'
        f'<g class="grid">{"".join(grid)}</g>{"".join(labels)}'
        '<svg class="plot" width="100%" height="100%" viewBox="0 0 1000 1000" '
        f'preserveAspectRatio="none">{"".join(paths)}</svg>{"".join(marks)}</svg></div>'
    )


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    """What lines and areas mean: pairs of an SVG sample, 36 by 14, and a text."""
    items = "".join(
        f'<li><svg viewBox="0 0 36 14" aria-hidden="true">{sample}</svg>{escape(text)}</li>'
        for sample, text in entries
    )
    return f'<ul class="legend">{items}</ul>'


def _line_sample(classes: str) -> str:
    return f'<line class="{classes}" x1="1" x2="35" y1="7" y2="7"/>'


def _area_sample(classes: str) -> str:
    return f'<rect class="{classes}" x="1" y="1" width="34" height="12"/>'


def _table(caption: str, head: str, rows: Iterable[str], classes: str = "scroll") -> str:
    """A table that scrolls by itself where it is wider than the screen, by keyboard too."""
    return (
        f'<div class="{classes}" role="region" tabindex="0" aria-label="{escape(caption)}"><table>'
        f"<caption><span>{escape(caption)}</span></caption><thead>{head}</thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(first: str, cells: Iterable[str]) -> str:
    return f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _head(names: Iterable[str]) -> str:
    cells = "".join(f'<th scope="col">{name}</th>' for name in names)
    return f"<tr>{cells}</tr>"


# --- what a section is made of --------------------------------------------------------------------


@dataclass(slots=True)
class _Series:
    """The runs of one policy with one size of disk."""

    label: str
    ours: bool
    colour: int
    marker: int
    dash: int
    runs: dict[int, Json] = field(default_factory=dict)
    """By budget, ascending."""

    @property
    def line(self) -> str:
        return f"series c{self.colour} d{self.dash}"

    @property
    def mark(self) -> str:
        return f"c{self.colour}" if self.ours else f"hollow c{self.colour}"


def _label(run: Json) -> str:
    system = str(run["system"])
    disk = run.get("disk_bytes")
    extra = f" + {_tick_size(disk)} disk" if _is_number(disk) and disk else ""
    return f"{_SYSTEMS.get(system, system)} {run['policy']}{extra}"


def _all_series(runs: Sequence[Json]) -> list[_Series]:
    """In the order of the runs. One colour for each policy, whatever system it runs in.

    KVLoft's lines are solid with filled markers, those of others dashed with hollow ones.
    """
    found: dict[str, _Series] = {}
    colours: dict[str, int] = {}
    dashed = 0
    for run in runs:
        label, ours = _label(run), run["system"] == "kvloft"
        if label not in found:
            colour = colours.setdefault(str(run["policy"]), len(colours))
            dash = 0 if ours else dashed % _DASHES + 1
            dashed += not ours
            colour %= _COLOURS
            taken = {one.marker for one in found.values() if one.colour == colour}
            turn = [(len(found) + i) % len(_MARKERS) for i in range(len(_MARKERS))]
            marker = next((marker for marker in turn if marker not in taken), turn[0])
            found[label] = _Series(label, ours, colour, marker, dash)
        found[label].runs[run["budget_bytes"]] = run
    for series in found.values():
        series.runs = dict(sorted(series.runs.items()))
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The best hit rates with one size of memory and disk, and who reached them."""

    budget: int
    disk: int
    ours: tuple[float, str] | None
    others: tuple[float, str] | None
    bound: tuple[float, str] | None

    @property
    def ratio(self) -> float | None:
        """Of the tokens restored: KVLoft's best over vLLM's best."""
        if self.ours is None or self.others is None or not self.others[0]:
            return None
        return self.ours[0] / self.others[0]

    @property
    def of_bound(self) -> float | None:
        """How much of the bound KVLoft's best reaches."""
        if self.ours is None or self.bound is None or not self.bound[0]:
            return None
        return self.ours[0] / self.bound[0]

    def sentence(self) -> str:
        """In words, escaped."""
        best = self.ours or self.others
        if best is None:
            raise ValueError("a comparison without runs")
        size = f"{_size(self.budget)}{f' and {_size(self.disk)} of disk' if self.disk else ''}"
        text = f"With <b>{size}</b>, {escape(best[1])}: {_percent(best[0])} of the prompt tokens"
        facts = []
        if self.ours and self.others:
            rate, name = self.others
            who = f"vLLM’s best ({escape(name.replace('vLLM ', ''))}"
            if self.ratio is None:
                text += f"; {who}): {_percent(rate)}"
            else:
                facts.append(f"{self.ratio:.2f} times {who}, {_percent(rate)})")
        if self.bound:
            rate, kind = self.bound
            points = round((rate - best[0]) * 100, 1)
            side = "below" if points > 0 else "above"
            far = f"{abs(points):.1f}\u00a0points {side}" if points else "at"
            facts.append(f"{far} the {escape(kind)} of {_percent(rate)}")
        return f"{text}. That is {' and '.join(facts)}." if facts else f"{text}."


def _best(runs: Iterable[Json]) -> tuple[float, str] | None:
    """The highest hit rate and the names of all who reached it."""
    rates = [(run["token_hit_rate"], _label(run)) for run in runs]
    if not rates:
        return None
    top = max(rate for rate, _ in rates)
    names = list(dict.fromkeys(label for rate, label in rates if rate == top))
    more = f" and {len(names) - 2} more" if len(names) > 3 else ""
    return top, (", ".join(names[:2]) + more) if more else " and ".join(names)


def _compare(runs: Iterable[Json], bounds: Mapping[int, Json]) -> list[_Comparison]:
    groups: dict[tuple[int, int], list[Json]] = {}
    for run in runs:
        groups.setdefault((run.get("disk_bytes") or 0, run["budget_bytes"]), []).append(run)
    found = []
    for (disk, budget), group in sorted(groups.items()):
        # Memory and disk together hold no more than memory of that size could.
        bound = bounds.get(budget + disk)
        found.append(
            _Comparison(
                budget,
                disk,
                _best(run for run in group if run["system"] == "kvloft"),
                _best(run for run in group if run["system"] != "kvloft"),
                (bound["token_hit_rate"], str(bound["kind"])) if bound else None,
            )
        )
    return found


_COLUMNS: Sequence[tuple[str, Sequence[tuple[str, str, Callable[[object], str]]]]] = (
    (
        "Restored",
        (
            ("hit rate", "token_hit_rate", _percent),
            ("tokens", "tokens_restored", _count),
            ("requests", "hit_requests", _count),
            ("bytes", "bytes_restored", _size),
            ("prefill saved", "prefill_seconds_saved", _duration),
        ),
    ),
    ("Bytes", (("stored", "bytes_stored", _size), ("held", "bytes_held", _size))),
    (
        "Resume points",
        (
            ("kept", "resume_points_kept", _count),
            ("used", "resume_points_used", _count),
            ("evicted", "evicted_resume_points", _count),
        ),
    ),
    ("Chunks", (("evicted", "evicted_chunks", _count),)),
    (
        "A call, ms",
        (
            ("p50", "call_p50_ms", _short),
            ("p99", "call_p99_ms", _short),
            ("p99.9", "call_p999_ms", _short),
            ("max", "call_max_ms", _short),
        ),
    ),
    ("Replay", (("took", "seconds", _duration),)),
)


class _Section:
    """One trace on one geometry."""

    def __init__(self, ident: str, entry: Json) -> None:
        self.ident = ident
        self.entry = entry
        self.trace = str(entry["trace"]["name"])
        self.title = f"{self.trace} on {entry['geometry']}"
        self.runs: list[Json] = list(entry["runs"])
        self.series = _all_series(self.runs)
        bounds: list[Json] = entry.get("bounds") or []
        self.bounds: dict[int, Json] = {
            bound["budget_bytes"]: bound
            for bound in sorted(bounds, key=lambda bound: bound["budget_bytes"])
            if _is_number(bound.get("token_hit_rate"))
        }
        everything = entry.get("everything")
        self.everything = everything if _is_number(everything) else None
        self.has_disk = any(run.get("disk_bytes") for run in self.runs)

    def parts(self) -> Iterator[str]:
        yield f'<section aria-labelledby="{self.ident}"><h2 id="{self.ident}">'
        yield f"{escape(self.title)}</h2>"
        yield self._facts()
        if self.runs:
            yield from self._hit_rates()
            yield from self._memory()
            yield "<h3>All runs</h3>"
            yield self._all_runs()
        else:
            yield "<p>Nothing was run.</p>"
        yield "</section>"

    def _facts(self) -> str:
        entry, trace = self.entry, self.entry["trace"]
        text = (
            f"{_count(trace.get('requests'))} requests in {_duration(trace.get('seconds'))} with "
            f"{_count(trace.get('prompt_tokens'))} prompt tokens and "
            f"{_count(trace.get('answer_tokens'))} answer tokens; prefixes are known in blocks of "
            f"{_count(trace.get('tokens_per_block'))} tokens and kept in chunks of "
            f"{_count(entry.get('tokens_per_chunk'))}."
        )
        if start := entry.get("measured_from"):
            text += f" The first {_count(start)} requests fill the cache and are not counted."
        if blocks := entry.get("engine_blocks"):
            text += f" The engine’s own cache of {_count(blocks)} blocks answers first."
        return f"<p>{text}</p>"

    # --- hit rates

    def _bound_name(self) -> str:
        kinds = " or ".join(dict.fromkeys(str(bound["kind"]) for bound in self.bounds.values()))
        return f"{kinds} (memory alone)" if self.has_disk else kinds

    def _hit_rates(self) -> Iterator[str]:
        comparisons = _compare(self.runs, self.bounds)
        yield "<h3>Tokens restored, by size</h3>"
        lead = self._lead(comparisons)
        if lead:
            yield f"<p>{lead}</p>"
        yield f"<ul>{''.join(f'<li>{item.sentence()}</li>' for item in comparisons)}</ul>"
        sizes = sorted(
            {size for size in self.bounds if size > 0}
            | {size for series in self.series for size in series.runs if size > 0}
        )
        if sizes:
            yield self._hit_rate_figure(sizes, re.sub(r"<[^>]*>", "", lead))
        yield self._hit_rate_table()

    def _lead(self, comparisons: Sequence[_Comparison]) -> str:
        ratios = [item.ratio for item in comparisons if item.ratio is not None]
        shares = [item.of_bound for item in comparisons if item.of_bound is not None]
        parts = []
        if ratios:
            parts.append(f"restores {_span(ratios, '{:.2f}'.format)} times what vLLM’s best does")
        if shares:
            kinds = " or ".join(dict.fromkeys(item.bound[1] for item in comparisons if item.bound))
            parts.append(f"reaches {_span(shares, _percent)} of the {escape(kinds)}")
        text = f"At equal sizes KVLoft’s best policy {' and '.join(parts)}. " if parts else ""
        if self.everything is not None:
            text += (
                f"If everything were kept for ever, {_percent(self.everything)} of the prompt "
                "tokens would be restored."
            )
        return text.strip()

    def _hit_rate_figure(self, sizes: Sequence[int], summary: str) -> str:
        rates = [run["token_hit_rate"] for run in self.runs]
        rates += [bound["token_hit_rate"] for bound in self.bounds.values()]
        x = _log_axis("size of the cache in memory", sizes)
        y = _share_axis("share of the prompt tokens", max([*rates, self.everything or 0.0]))
        paths, marks, legend = [], [], []

        def line(name: str, rates: Mapping[int, Json], symbol: str, style: str) -> list[Point]:
            """The points of a line, each with its marker."""
            points = []
            for size, rate in ((size, one["token_hit_rate"]) for size, one in rates.items()):
                if size > 0:
                    points.append((x.share(math.log2(size)), y.share(rate)))
                    title = f"{name}, {_size(size)}: {_percent(rate)}"
                    marks.append(_mark(*points[-1], symbol, style, title))
            return points

        if bound := line(self._bound_name(), self.bounds, "mb", "bound"):
            above = [*bound, (bound[-1][0], 1.0), (bound[0][0], 1.0)]
            paths += [_path(above, "unreachable", closed=True), _path(bound, "bound")]
        if self.everything is not None:
            level = y.share(self.everything)
            paths.append(_path([(0, level), (1, level)], "everything"))
        for series in self.series:
            symbol = f"m{series.marker}"
            if points := line(series.label, series.runs, symbol, series.mark):
                paths.append(_path(points, series.line))
            use = f'<use href="#{symbol}" x="18" y="7" class="{series.mark}"/>'
            legend.append((_line_sample(series.line) + use, series.label))
        if bound:
            sample = _area_sample("unreachable") + _line_sample("bound")
            legend.append((sample, f"{self._bound_name()}; out of reach above"))
        if self.everything is not None:
            legend.append((_line_sample("everything"), "everything kept for ever"))
        drawing = _chart(
            f"{self.ident}-rates",
            f"Share of prompt tokens restored by size of the cache, {self.title}",
            f"{summary} The table below has the same numbers.",
            x,
            y,
            paths,
            marks,
        )
        return f"<figure>{drawing}{_legend(legend)}</figure>"

    def _hit_rate_table(self) -> str:
        sizes = sorted({*self.bounds, *(size for one in self.series for size in one.runs)})
        best = {
            size: max(one.runs[size]["token_hit_rate"] for one in self.series if size in one.runs)
            for size in sizes
            if any(size in one.runs for one in self.series)
        }
        rows = []
        for series in self.series:
            cells = []
            for size in sizes:
                rate = series.runs.get(size, {}).get("token_hit_rate")
                text = _percent(rate)
                # By weight, not by colour; a column of zeros has no best.
                cells.append(f"<b>{text}</b>" if rate and rate == best[size] else text)
            rows.append(_row(escape(series.label), cells))
        if self.bounds:
            cells = [_percent(self.bounds.get(size, {}).get("token_hit_rate")) for size in sizes]
            if len(kinds := {str(bound["kind"]) for bound in self.bounds.values()}) > 1:
                cells = [
                    f"{cell}<br><small>{escape(str(self.bounds[size]['kind']))}</small>"
                    if size in self.bounds
                    else cell
                    for size, cell in zip(sizes, cells, strict=True)
                ]
            rows.append(_row(escape(self._bound_name() if len(kinds) == 1 else "bound"), cells))
        if self.everything is not None:
            rows.append(_row("everything kept", [_percent(self.everything)] * len(sizes)))
        head = _head(["Policy", *(_size(size) for size in sizes)])
        caption = "Share of the prompt tokens restored; the best of each size is bold"
        return _table(caption, head, rows)

    # --- memory

    def _memory(self) -> Iterator[str]:
        yield "<h3>Memory by class of chunk</h3>"
        drawn = [
            (f"{self.ident}-m{i}-{j}", series, run)
            for i, series in enumerate(self.series)
            for j, run in enumerate(series.runs.values())
            if run.get("timeline")
        ]
        if not drawn:
            yield "<p>No timeline was recorded.</p>"
            return
        first = next((series for _, series, _ in drawn if series.ours), drawn[0][1])
        default = [ident for ident, series, _ in drawn if series is first][-1]
        place = f"{self.ident}-memory"
        groups: dict[str, list[str]] = {}
        for ident, series, run in drawn:
            chosen = " selected" if ident == default else ""
            groups.setdefault(series.label, []).append(
                f'<option value="{ident}"{chosen}>{escape(series.label)}, '
                f"{_size(run['budget_bytes'])}</option>"
            )
        options = "".join(
            f'<optgroup label="{escape(label)}">{"".join(group)}</optgroup>'
            for label, group in groups.items()
        )
        # Without a script there is nothing to choose from.
        yield (
            f'<p class="chooser" hidden><label for="{place}-run">Run</label> '
            f'<select id="{place}-run" data-place="{place}" autocomplete="off">{options}</select>'
            "</p>"
        )
        figures = {ident: self._memory_figure(ident, series, run) for ident, series, run in drawn}
        yield f'<div id="{place}">{figures.pop(default)}</div>'
        for ident, figure in figures.items():
            yield f'<template id="{ident}">{figure}</template>'

    def _memory_figure(self, ident: str, series: _Series, run: Json) -> str:
        points: list[Json] = list(run["timeline"])
        budget = run["budget_bytes"]
        totals = [0.0] * len(points)
        x, times = _time_axis(points)
        y_top = max(budget, *(sum(_bytes_of(point).values()) for point in points))
        y = _byte_axis("bytes", y_top)
        places = [x.share(time) for time in times]
        if len(points) == 1:
            places = [0.0, 1.0]
        paths, legend = [], []
        for key, style, name in _CLASSES:
            below = totals
            totals = [
                total + _bytes_of(point)[key] for total, point in zip(below, points, strict=True)
            ]
            # A class that never holds anything would only lengthen the legend.
            if totals != below:
                pad = len(places) - len(points)
                top = [y.share(total) for total in totals + totals[-1:] * pad]
                bottom = [y.share(total) for total in below + below[-1:] * pad]
                outline = [*zip(places, top, strict=True)]
                outline += reversed([*zip(places, bottom, strict=True)])
                paths.append(_path(outline, style, closed=True))
                legend.append((_area_sample(style), name))
        level = y.share(budget)
        paths.append(_path([(0, level), (1, level)], "budget"))
        legend.append((_line_sample("budget"), f"budget, {_size(budget)}"))
        title = f"{series.label}, {_size(budget)}"
        drawing = _chart(
            ident + "-c",
            f"Memory by class of chunk over time: {title}",
            f"The budget is {_size(budget)}. The table below has the same numbers.",
            x,
            y,
            paths,
            [],
        )
        return (
            f"<figure><figcaption>{escape(title)}</figcaption>{drawing}{_legend(legend[::-1])}"
            f"<details><summary>The same as a table</summary>{_timeline_table(title, points)}"
            "</details></figure>"
        )

    def _all_runs(self) -> str:
        groups = "".join(
            f'<th scope="colgroup" colspan="{len(columns)}">{name}</th>'
            for name, columns in _COLUMNS
        )
        columns = [column for _, group in _COLUMNS for column in group]
        names = "".join(f'<th scope="col">{name}</th>' for name, _, _ in columns)
        head = f'<tr><th scope="col" rowspan="2">Policy, size</th>{groups}</tr><tr>{names}</tr>'
        rows = [
            _row(
                f'{escape(series.label)} <span class="size">{_size(size)}</span>',
                [shown(run.get(key)) for _, key, shown in columns],
            )
            for series in self.series
            for size, run in series.runs.items()
        ]
        return _table(f"All runs of {self.title}", head, rows, "scroll wide")


def _bytes_of(point: Json) -> dict[str, float]:
    return {key: point[key] if _is_number(point.get(key)) else 0 for key, _, _ in _CLASSES}


def _timeline_table(title: str, points: Iterable[Json]) -> str:
    rows = [
        _row(
            _count(point.get("request")),
            [
                _duration(point.get("time")),
                *(_size(point.get(key)) for key, _, _ in _CLASSES),
                _size(sum(_bytes_of(point).values())),
                _percent(point.get("token_hit_rate")),
            ],
        )
        for point in points
    ]
    names = [name for _, _, name in _CLASSES]
    head = _head(["Request", "time", *names, "together", "hit rate so far"])
    return _table(f"Memory by class of chunk: {title}", head, rows)


# --- the page -------------------------------------------------------------------------------------


def _body(result: Json, names: str, sections: Sequence[_Section]) -> Iterator[str]:
    symbols = "".join(f'<path id="m{i}" d="{d}"/>' for i, d in enumerate(_MARKERS))
    yield f'<svg class="symbols" aria-hidden="true"><defs>{symbols}'
    yield '<path id="mb" d="M-7,-1.5h14v3h-14z"/></defs></svg>'
    yield f"<main><h1>Replay of {escape(names)}</h1>"
    when = _time_text(result.get("time"))
    yield f'<p class="muted">KVLoft {escape(str(result.get("version") or ""))}{when}</p>'
    yield (
        "<p>The requests of a trace went through KVLoft’s books with each policy and size of the "
        "cache; memory was counted, not copied. A hit rate is the share of the prompts’ tokens "
        "that were restored from the cache rather than computed.</p>"
    )
    if len(sections) > 1:
        links = "".join(
            f'<li><a href="#{section.ident}">{escape(section.title)}</a></li>'
            for section in sections
        )
        yield f'<nav aria-label="Replays"><ul>{links}</ul></nav>'
    for section in sections:
        yield from section.parts()
    if machine := result.get("machine"):
        facts = "".join(
            f"<dt>{escape(str(key))}</dt><dd>{escape(str(value))}</dd>"
            for key, value in machine.items()
        )
        yield f'<section aria-labelledby="machine"><h2 id="machine">Machine</h2><dl>{facts}</dl>'
        yield "</section>"
    yield "</main>"


def _time_text(value: object) -> str:
    """The moment of the replay as ``, 3 December 2026, 12:00 UTC``; empty where there is none."""
    if not value:
        return ""
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        return f", {escape(str(value))}"
    zone = f" {moment.tzname()}" if moment.tzinfo else ""
    return f", {moment.day} {moment:%B %Y, %H:%M}{zone}"
