"""A run as one self-contained HTML page: no network, readable on a phone and in print."""

from collections.abc import Sequence
from html import escape
from importlib import resources

from octavo.bench.charts import roofline_chart, size_charts, speed_chart
from octavo.bench.results import Record
from octavo.bench.schedules import schedule_charts
from octavo.bench.summary import Case, Summary, case_name, geometric_mean

_FIGURES = (
    ("us", "judged time"),
    ("us_low", "20 %"),
    ("us_high", "80 %"),
    ("tflops", "TFLOP/s"),
    ("gbps", "GB/s"),
    ("run_us", "run alone"),
    ("call_us", "one call"),
    ("plan_us", "plan"),
    ("step_us", "plan and run, by the wall clock"),
    ("host_us", "host: run"),
    ("plan_host_us", "host: plan"),
    ("reps", "repetitions"),
)


def html_page(summaries: Sequence[Summary]) -> str:
    """The whole page, one section per run."""
    style = resources.files("octavo.bench").joinpath("report.css").read_text()
    body = "\n".join(_section(summary) for summary in summaries)
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>Octavo benchmarks</title><style>\n{style}</style></head>\n"
        f"<body><main><h1>Octavo benchmarks</h1>\n{body}\n</main></body></html>\n"
    )


def _section(summary: Summary) -> str:
    first = summary.records[0]
    parts = [f"<section><h2>{escape(first['card'])}</h2>", _facts(first), _headline(summary)]
    if any(case.us(summary.ours) for case in summary.cases):
        parts += ["<h3>Speed, batch by batch</h3>", _figure(speed_chart(summary))]
    parts += ["<h3>Times</h3>", _times(summary), _failures(summary)]
    roofline = roofline_chart(summary)
    if roofline:
        parts += ["<h3>Against the machine's ceilings</h3>", _figure(roofline)]
    for title, chart in size_charts(summary):
        parts += [f"<h3>{escape(title)}</h3>", _figure(chart)]
    for title, chart in schedule_charts(summary):
        parts += [f"<h3>{escape(title)}</h3>", f"<figure class='schedule'>{chart}</figure>"]
    return "\n".join([*parts, _all_figures(summary), "</section>"])


def _facts(record: Record) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    ceilings = f"matmul {record['ceilings']['tflops']:.3g} TFLOP/s, copy {record['ceilings']['gbps']:,.0f} GB/s"
    spec = record["spec"]
    shape = f"{spec['num_qo_heads']} query heads, {spec['num_kv_heads']} K/V heads, head_dim {spec['head_dim']}"
    shape += f", page_size {spec['page_size']}, {spec['dtype']}, {'causal' if spec['causal'] else 'not causal'}"
    rows = {
        "commit": record["commit"],
        "date": record["date"][:10],
        "versions": versions,
        "measured ceilings": ceilings,
        "problem": f"{shape}, page ids {record['pages']}; a case's name says where it differs",
    }
    return f"<dl>{''.join(f'<dt>{name}</dt><dd>{escape(value)}</dd>' for name, value in rows.items())}</dl>"


def _headline(summary: Summary) -> str:
    ratios = summary.ratios()
    if not ratios:
        return ""
    ahead = sum(ratio >= 1 for ratio in ratios)
    mean = geometric_mean(ratios)
    text = f"<b>{mean:.2f} times</b> the speed of the best paged peer (geometric mean over {len(ratios)} batches); "
    planned = summary.planned_ratios()
    more = f"Where peers' planning, once a step, counts too: {geometric_mean(planned):.2f} times."
    more = more if planned != ratios else ""
    return f"<p class='headline'>{escape(summary.ours)}: {text}ahead on {ahead} of them. {escape(more)}</p>"


def _figure(svg: str) -> str:
    return f"<figure>{svg}</figure>"


def _times(summary: Summary) -> str:
    head = "".join(f"<th>{escape(label)}</th>" for label in summary.labels)
    rows = "\n".join(_times_row(summary, case) for case in summary.cases)
    note = "Medians in us. Octavo's include planning; peers' do not, it stands below them. Bold: fastest. "
    note += "Ratio: best paged peer / Octavo, and below it the same with the peers' planning."
    return (
        f"<p class='note'>{note}</p><div class='wide'><table><thead><tr><th>batch</th>{head}<th>ratio</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _times_row(summary: Summary, case: Case) -> str:
    times = [record["us"] for record in case.timed().values()]
    cells = []
    for label in summary.labels:
        record = case.records.get(label, {})
        if "us" not in record:
            cells.append("<td class='error'>error</td>" if "error" in record else "<td></td>")
            continue
        bold = " class='best'" if record["us"] == min(times) else ""
        plan = case.plan_us(label)
        more = f"<small>+{plan:,.0f} plan</small>" if plan else ""
        cells.append(f"<td{bold}>{record['us']:,.1f}<small>{case.rate(label)}</small>{more}</td>")
    peer = case.best_peer()
    ratio = case.speed_of(summary.ours, peer) if peer else None
    planned = case.planned_speed_of(summary.ours)
    last = f"{ratio:.2f}<small>{escape(peer or '')}</small><small>{planned:.2f}</small>" if ratio and planned else ""
    return f"<tr><th>{escape(case.name)}</th>{''.join(cells)}<td>{last}</td></tr>"


def _failures(summary: Summary) -> str:
    lines = [
        f"<li>{escape(case_name(record))}, {escape(record['impl'])}: {escape(record['error'])}</li>"
        for record in summary.failures()
    ]
    return f"<h3>Failures</h3><ul class='failures'>{''.join(lines)}</ul>" if lines else ""


def _all_figures(summary: Summary) -> str:
    head = "".join(f"<th>{title}</th>" for _, title in _FIGURES)
    rows = []
    for record in summary.records:
        if "us" in record:
            cells = "".join(f"<td>{_number(record.get(name))}</td>" for name, _ in _FIGURES)
            rows.append(f"<tr><th>{escape(case_name(record))}</th><th>{escape(record['impl'])}</th>{cells}</tr>")
    return (
        "<details><summary>All figures (microseconds unless the heading says otherwise)</summary><div class='wide'>"
        f"<table><thead><tr><th>batch</th><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 or isinstance(value, int) else f"{value:.3g}"
