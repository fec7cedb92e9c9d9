"""What is made of recorded results: ratios, the terminal table, the page, how it looks in a browser."""

import re
import shutil
import struct
import subprocess
import xml.etree.ElementTree as ElementTree
import zlib
from collections import Counter
from html import escape
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from octavo.bench import results
from octavo.bench.charts import roofline_chart, size_charts, speed_chart
from octavo.bench.problems import Problem, parse_case
from octavo.bench.report import html_page
from octavo.bench.results import Context
from octavo.bench.schedules import schedule_charts
from octavo.bench.summary import Summary, summarize
from octavo.bench.table import broken, closing_lines, results_table
from octavo.cli.app import app

CASES = ("1x128/128", "1x1k/1k", "1x4k/4k", "decode 16x1/4k", "decode 64x1/4k", "dead 12383/1")
TIMES = {"octavo": 100.0, "flashinfer-fa3": 120.0, "fa4": 90.0, "fa3-dense": 50.0, "seed": 40_000.0, "mine <b>": 95.0}


def _records() -> list[results.Record]:
    context = Context("r1", "abcdef", "A card & more", {"octavo": "0.1"}, {"tflops": 800.0, "gbps": 4000.0})
    records = []
    for case in CASES:
        problem = Problem(case, parse_case(case))
        for impl, us in TIMES.items():
            event = {"event": "result", "impl": impl, "us": us, "us_low": us, "us_high": us, "reps": 9, "repeats": True}
            if (case, impl) == ("dead 12383/1", "seed"):
                event = {"event": "error", "impl": impl, "error": "check: <NaN>"}
            records.append(context.record(problem, event))
    return records


@pytest.fixture
def summary() -> Summary:
    return summarize(_records())


def test_the_bar_is_the_best_paged_peer(summary: Summary) -> None:
    case = summary.cases[0]
    assert case.best_peer() == "fa4"  # neither the contiguous one nor the seed nor Octavo itself
    assert summary.ratios() == pytest.approx([0.9] * len(CASES))
    assert case.memory_bound() and not summary.cases[2].memory_bound()


def test_failures_and_the_mean_follow_the_table(summary: Summary) -> None:
    lines = closing_lines(summary)
    assert "0.90x the best paged peer" in lines[0] and "ahead on 0 of 6" in lines[0]
    assert lines[1] == "error: dead 12383/1, seed: check: <NaN>"
    assert not broken(summary)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(results_table(summary))
    shown = console.export_text()
    assert all(case in shown for case in CASES) and "0.90x" in shown and "error" in shown


def test_planning_of_peers_is_shown_and_counted() -> None:
    plans = {"octavo": 7.0, "flashinfer-fa3": 300.0, "fa4": 400.0, "mine <b>": 500.0}
    records = [{**r, "plan_us": plans[r["impl"]]} if r["impl"] in plans and "us" in r else r for r in _records()]
    summary = summarize(records)
    assert summary.cases[0].plan_us("octavo") == 0.0 and summary.cases[0].plan_us("fa4") == 400.0
    assert summary.planned_ratios() == pytest.approx([4.2] * len(CASES))
    assert "4.20x where peers' planning" in closing_lines(summary)[1]
    assert "+300 plan" in html_page([summary]) and "4.20 times" in html_page([summary])


def test_schedules_are_drawn_where_the_card_is_known(summary: Summary) -> None:
    assert not list(schedule_charts(summary))
    more = {"sms": 132, "backend": "triton"}
    known = summarize([{**r, **more} for r in _records() if r["case"] != "1x4k/4k"])
    charts = dict(schedule_charts(known))
    assert list(charts) == ["Schedule of decode 16x1/4k, predicted", "Schedule of decode 64x1/4k, predicted"]
    for chart in charts.values():
        ElementTree.fromstring(chart)
    assert "Schedule of decode 16x1/4k" in html_page([known])


def test_two_commits_of_a_run_are_two_columns() -> None:
    records = _records()
    older = [{**record, "commit": "0123456789", "us": 200.0} for record in records if record["impl"] == "octavo"]
    summary = summarize([*records, *older])
    assert summary.labels[:2] == ["octavo", "octavo@0123456"]
    assert summary.cases[0].speed_of("octavo", "octavo@0123456") == 2.0


def test_pictures_are_well_formed_and_show_every_time(summary: Summary) -> None:
    curves = size_charts(summary)
    assert [title for title, _ in curves] == ["Prefill of one sequence from its start"]
    roofline = roofline_chart(summary)
    assert roofline is not None
    for svg in (speed_chart(summary), roofline, curves[0][1]):
        root = ElementTree.fromstring(svg)
        width, height = (float(n) for n in root.attrib["viewBox"].split()[2:])
        texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
        assert texts and all(0 <= float(t.attrib["x"]) <= width and 0 <= float(t.attrib["y"]) <= height for t in texts)
    tips = [e.text or "" for e in ElementTree.fromstring(speed_chart(summary)).iter() if e.tag.endswith("title")]
    assert sum("100.0 us" in tip for tip in tips) == len(CASES)


def test_page_is_self_contained(summary: Summary) -> None:
    page = html_page([summary])
    links = page.replace("http://www.w3.org/2000/svg", "")
    assert not any(word in links for word in ("http:", "https:", "<script", "<link", "@import", "url(", "src="))
    assert "A card &amp; more" in page and escape("mine <b>") in page and "mine <b>" not in page
    assert "0.90 times" in page and "check: &lt;NaN&gt;" in page


def test_report_command(tmp_path: Path) -> None:
    for record in _records():
        results.append(tmp_path / "r.jsonl", record)
    files = ["--html", str(tmp_path / "r.html"), "--svg", str(tmp_path / "r.svg")]
    done = CliRunner().invoke(app, ["report", str(tmp_path / "r.jsonl"), *files])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "r.html").read_text() == html_page([summarize(_records())])
    assert ElementTree.parse(tmp_path / "r.svg").getroot().tag.endswith("svg")
    missing = CliRunner().invoke(app, ["report", str(tmp_path / "r.jsonl"), "--run", "other"])
    assert missing.exit_code == 2 and "fix:" in missing.output


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FRAME = """<!doctype html><body style='margin:0'><iframe id='page' style='width:{width}px;height:900px;border:0'
srcdoc="{page}"></iframe><script>document.getElementById('page').onload = function () {{
  const root = this.contentDocument.documentElement;
  const inside = [...root.querySelectorAll('main, section, figure, svg, p, dl, h3, .wide, details')];
  document.title = root.scrollWidth + ' ' + Math.max(...inside.map(e => Math.ceil(e.getBoundingClientRect().right)));
}}</script>"""


@pytest.fixture
def page(tmp_path: Path) -> str:
    """A page with everything: plans, failures, curves, schedules."""
    more = {"sms": 132, "backend": "triton", "plan_us": 300.0}
    return html_page([summarize([{**record, **more} for record in _records()])])


def _browse(*arguments: str) -> str:
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_overflows_in_a_browser(width: int, page: str, tmp_path: Path) -> None:
    frame = tmp_path / "frame.html"
    frame.write_text(_FRAME.format(width=width, page=escape(page, quote=True)))
    dom = _browse("--dump-dom", f"file://{frame}")
    scroll, right = (int(n) for n in dom.split("<title>")[1].split("</title>")[0].split())
    assert scroll <= width and right <= width


def _pixels(png: bytes) -> tuple[int, int, Counter[bytes]]:
    """(width, height, how often each RGB colour occurs) of a PNG with 8 bits a channel, RGB or RGBA."""
    place, data, width, height, channels = 8, b"", 0, 0, 0
    while place < len(png):
        length, kind = struct.unpack(">I4s", png[place : place + 8])
        chunk = png[place + 8 : place + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", chunk)
            assert (depth, interlaced) == (8, 0) and colour in (2, 6)
            channels = 3 if colour == 2 else 4
        data += chunk if kind == b"IDAT" else b""
        place += length + 12
    raw, stride = zlib.decompress(data), width * channels
    above, colours = bytearray(stride), Counter[bytes]()
    for row in range(height):
        start = row * (stride + 1)
        above = _unfiltered(raw[start], raw[start + 1 : start + 1 + stride], above, channels)
        colours.update(bytes(above[i : i + 3]) for i in range(0, stride, channels))
    return width, height, colours


def _unfiltered(kind: int, line: bytes, above: bytearray, step: int) -> bytearray:
    """A row of a PNG, from its filtered bytes and the row above (PNG specification, 9.2)."""
    row = bytearray(line)
    for i in range(len(row) if kind else 0):
        left, up, corner = (row[i - step], above[i], above[i - step]) if i >= step else (0, above[i], 0)
        guess = left + up - corner
        near = min((abs(guess - left), 0, left), (abs(guess - up), 1, up), (abs(guess - corner), 2, corner))[2]
        row[i] = (row[i] + (0, left, up, (left + up) // 2, near)[kind]) & 255
    return row


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_screenshot_is_not_empty(page: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page)
    _browse("--window-size=640,700", f"--screenshot={tmp_path / 'page.png'}", f"file://{tmp_path / 'page.html'}")
    width, height, colours = _pixels((tmp_path / "page.png").read_bytes())
    inked = sum(count for colour, count in colours.items() if colour != b"\xff\xff\xff")
    assert inked > 0.02 * width * height
    assert colours[bytes((0xD5, 0x5E, 0x00))] > 50  # Octavo's marks


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_it_prints(page: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page)
    _browse(f"--print-to-pdf={tmp_path / 'page.pdf'}", f"file://{tmp_path / 'page.html'}")
    pdf = (tmp_path / "page.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and 1 <= len(re.findall(rb"/Type ?/Page\b", pdf)) <= 12
