"""The table and the plot of `make bench-policies`: Markdown, and an SVG of our own that reads on light and dark pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from rootlet.bench.policy_runs import Outcome, Setup

Results = Mapping[tuple[str, Setup], Outcome]

COLUMNS = (
    "workload",
    "policy",
    "cache",
    "cached tokens",
    "computed tokens",
    "TTFT p50 s",
    "TTFT p95 s",
    "TPOT ms",
    "KV mean / peak %",
    "retractions",
)
CELLS: tuple[Callable[[Outcome], str], ...] = (
    lambda o: str(o.cached_len),
    lambda o: str(o.computed_len),
    lambda o: f"{o.ttft(50):.2f}",
    lambda o: f"{o.ttft(95):.2f}",
    lambda o: f"{1000 * o.tpot:.0f}",
    lambda o: f"{100 * o.kv_mean:.0f}/{100 * o.kv_peak:.0f}",
    lambda o: str(o.retractions),
)

PANEL, BAR, HEIGHT, TOP, LEFT = 260, 18, 190, 46, 48
ON, OFF, INK = "#2a7f9e", "#b9b2a3", "#777"


def table(results: Results, names: Sequence[str], policies: Sequence[str], pages: Sequence[int]) -> str:
    """A line a workload, policy and cache; in each cell the values of all page sizes."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for name in names:
        for policy in policies:
            for cache in (True, False):
                outcomes = [results[name, Setup(policy, cache, page)] for page in pages]
                cells = (" · ".join(cell(outcome) for outcome in outcomes) for cell in CELLS)
                lines.append(f"| {name} | {policy} | {'on' if cache else 'off'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(results: Results, names: Sequence[str], policies: Sequence[str], page_size: int) -> str:
    """Time to the first token: bars to the median, lines to the 95th percentile; a panel a workload, each with a scale of its own."""
    width, height = LEFT + PANEL * len(names), TOP + HEIGHT + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="sans-serif"'
        f' font-size="11" fill="{INK}">',
        f'<text x="{LEFT}" y="14">Seconds to the first token, page size {page_size}: bar = median, line = 95th percentile</text>',
        f'<rect x="{LEFT}" y="22" width="10" height="10" fill="{ON}"/><text x="{LEFT + 14}" y="31">prefix cache on</text>',
        f'<rect x="{LEFT + 120}" y="22" width="10" height="10" fill="{OFF}"/><text x="{LEFT + 134}" y="31">off</text>',
    ]
    for at, name in enumerate(names):
        parts += _panel({key[1]: value for key, value in results.items() if key[0] == name}, name, policies, page_size, LEFT + at * PANEL)
    return "\n".join([*parts, "</svg>", ""])


def _panel(results: Mapping[Setup, Outcome], name: str, policies: Sequence[str], page_size: int, left: int) -> list[str]:
    """One workload: four groups of two bars over a base line, the top of the scale written at its height."""
    bottom = TOP + HEIGHT
    top_s = max(outcome.ttft(95) for setup, outcome in results.items() if setup.page_size == page_size)
    step = (PANEL - 40) / len(policies)
    parts = [
        f'<line x1="{left}" y1="{bottom}" x2="{left + PANEL - 30}" y2="{bottom}" stroke="{INK}"/>',
        f'<text x="{left - 6}" y="{TOP + 4}" text-anchor="end">{top_s:.1f}</text>',
        f'<text x="{left - 6}" y="{bottom}" text-anchor="end">0</text>',
        f'<text x="{left + PANEL / 2 - 20}" y="{bottom + 36}" text-anchor="middle" font-weight="bold">{escape(name)}</text>',
    ]
    for group, policy in enumerate(policies):
        x = left + 10 + group * step
        parts.append(f'<text x="{x + BAR}" y="{bottom + 16}" text-anchor="middle">{escape(policy)}</text>')
        for side, (cache, colour) in enumerate(((True, ON), (False, OFF))):
            outcome = results[Setup(policy, cache, page_size)]
            high, far = (HEIGHT * outcome.ttft(percent) / top_s for percent in (50, 95))
            begin, middle = x + side * BAR, x + side * BAR + BAR / 2 - 1
            parts.append(f'<rect x="{begin:.1f}" y="{bottom - high:.1f}" width="{BAR - 2}" height="{high:.1f}" fill="{colour}"/>')
            parts.append(f'<line x1="{middle:.1f}" y1="{bottom - high:.1f}" x2="{middle:.1f}" y2="{bottom - far:.1f}" stroke="{INK}"/>')
    return parts
