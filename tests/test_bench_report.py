"""What is made of recorded results: ratios, the terminal table, the page, how it looks in a browser."""

import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
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
_FRAME = """<!doctype html><iframe id='page' style='width:{width}px;height:900px;border:0' srcdoc="{page}"></iframe>
<script>document.getElementById('page').onload = function () {{
  const root = this.contentDocument.documentElement, wide = [...root.querySelectorAll('main, section, figure, p, dl')];
  document.title = root.scrollWidth + ' ' + Math.max(...wide.map(e => Math.ceil(e.getBoundingClientRect().right)));
}}</script>"""


def _browse(*arguments: str) -> str:
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_overflows_in_a_browser(width: int, summary: Summary, tmp_path: Path) -> None:
    frame = tmp_path / "frame.html"
    frame.write_text(_FRAME.format(width=width, page=escape(html_page([summary]), quote=True)))
    dom = _browse("--dump-dom", f"file://{frame}")
    scroll, right = (int(n) for n in dom.split("<title>")[1].split("</title>")[0].split())
    assert scroll <= width and right <= width


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_screenshot_is_not_empty(summary: Summary, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "page.html").write_text(html_page([summary]))
    _browse("--window-size=800,1400", f"--screenshot={tmp_path / 'page.png'}", f"file://{tmp_path / 'page.html'}")
    pixels = image.open(tmp_path / "page.png").convert("RGB")
    colours = pixels.getcolors(maxcolors=1 << 20)
    inked = sum(count for count, colour in colours if colour != (255, 255, 255))
    assert inked > 0.02 * pixels.width * pixels.height
    assert any(colour == (0xD5, 0x5E, 0x00) for _, colour in colours)
