"""A run's results as a terminal table."""

from rich.markup import escape
from rich.table import Table

from octavo.bench.summary import Case, Summary, geometric_mean, is_ours


def results_table(summary: Summary) -> Table:
    """One row a case: microseconds and rate of each implementation, and Octavo's speed over the best paged peer's."""
    first = summary.records[0]
    table = Table(title=f"{first['card']}, octavo at {first['commit']}", title_justify="left", header_style="bold")
    table.add_column("batch", no_wrap=True)
    for label in summary.labels:
        table.add_column(f"{label.replace('-', chr(10))}\nus", justify="right", overflow="fold")
    table.add_column("against\nbest peer", justify="right", no_wrap=True)
    for case in summary.cases:
        table.add_row(escape(case.name), *(_cell(case, label) for label in summary.labels), _ratio(summary, case))
    return table


def _cell(case: Case, label: str) -> str:
    record = case.records.get(label)
    if record is None:
        return "[dim]-[/]"
    if "error" in record:
        return "[red]error[/]"
    text = f"{_microseconds(record['us'])}\n[dim]{case.rate(label)}[/]"
    if plan := case.plan_us(label):
        text += f"\n[dim]+{_microseconds(plan)} plan[/]"
    text += "" if record.get("repeats", True) else "\n[yellow]bits vary[/]"
    fastest = min(r["us"] for r in case.timed().values())
    return f"[bold green]{text}[/]" if record["us"] == fastest else text


def _microseconds(us: float) -> str:
    return f"{us:.1f}" if us < 1000 else f"{us:,.0f}"


def _ratio(summary: Summary, case: Case) -> str:
    peer = case.best_peer()
    ratio = case.speed_of(summary.ours, peer) if peer else None
    if peer is None or ratio is None:
        return "[dim]-[/]"
    return f"[{'green' if ratio >= 1 else 'red'}]{ratio:.2f}x[/]\n[dim]{escape(peer)}[/]"


def closing_lines(summary: Summary) -> list[str]:
    """What the table leaves out: the mean ratio and every failure."""
    lines = []
    if ratios := summary.ratios():
        ahead = sum(ratio >= 1 for ratio in ratios)
        mean = geometric_mean(ratios)
        lines.append(
            f"{summary.ours}: {mean:.2f}x the best paged peer (geometric mean), ahead on {ahead} of {len(ratios)}"
        )
        if (planned := summary.planned_ratios()) != ratios:
            lines.append(
                f"{summary.ours}: {geometric_mean(planned):.2f}x where peers' planning, once a step, counts too"
            )
    for record in summary.failures():
        lines.append(f"error: {record['case']}, {record['impl']}: {record['error']}")
    return lines


def broken(summary: Summary) -> bool:
    """Whether Octavo itself failed anywhere."""
    return any(is_ours(record["impl"]) for record in summary.failures())
