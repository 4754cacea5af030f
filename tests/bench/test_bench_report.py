"""Tables from records, and the marker blocks they fill."""

import json

import pytest

from fastswin.bench import report
from fastswin.bench.tables import make_table, print_table, to_markdown, to_text

DOCUMENT = {
    "suite": "model", "created": "2026-11-28T10:00:00Z", "commit": "0123456789abcdef",
    "gpu": "NVIDIA H100 80GB HBM3", "torch": "2.11.0", "triton": "3.6.0",
    "copy_tbs": 3.02, "gemm_tflops": 700,
    "records": [
        {"case": "swin_t", "dtype": "fp16", "batch": 32, "variant": "fastswin", "median_ms": 1.0,
         "p20_ms": 0.99, "p80_ms": 1.02, "peak_mib": 300, "roofline_ms": 0.41,
         "max_abs_err": 0.004, "graph": True},
        {"case": "swin_t", "dtype": "fp16", "batch": 32, "variant": "compile-reduce-overhead",
         "median_ms": 3.05},
        {"case": "swin_t", "dtype": "fp16", "batch": 32, "variant": "eager", "median_ms": 10.6},
        {"case": "swin_t", "dtype": "bf16", "batch": 1, "variant": "fastswin", "median_ms": 0.2,
         "commit": "fedcba9876543210-dirty", "images_per_s": 5000.0},
        {"case": "swin_t", "dtype": "bf16", "batch": 1, "variant": "eager", "median_ms": 8.0},
        {"case": "swin_s", "dtype": "fp16", "batch": 1, "variant": "eager", "median_ms": 14.0},
    ],
}  # fmt: skip

GOLDEN = """\
| model | dtype | batch | fastswin ms | compile-reduce-overhead ms | eager ms | speed-up \
| % of roofline | max abs err | img/s |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| swin_s | fp16 | 1 | - | - | 14.0 | - | - | - | - |
| swin_t | fp16 | 32 | 1.000 | 3.050 | 10.6 | 3.05x | 41 | 4.0e-03 | 32000 |
| swin_t | bf16 | 1 | 0.200 | - | 8.000 | 40.00x (eager) | - | - | 5000 |

NVIDIA H100 80GB HBM3; torch 2.11.0, Triton 3.6.0; commit 0123456789, fedcba9876-dirty; \
2026-11-28T10:00:00Z; copy 3.02 TB/s, GEMM 700 TFLOP/s in the last run. Median latency in ms; \
speed-up of fastswin over compile-reduce-overhead."""


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "benchmarks" / "results" / "nvidia-h100-80gb-hbm3"
    folder.mkdir(parents=True)
    (folder / "model.json").write_text(json.dumps(DOCUMENT))
    (tmp_path / "docs").mkdir()
    return tmp_path


def block(name, words="", body=""):
    return f"before\n<!-- bench:{name}:begin{words} -->\n{body}<!-- bench:{name}:end -->\nafter\n"


def test_markdown_is_golden():
    assert to_markdown(make_table(DOCUMENT)) == GOLDEN


def test_rows_go_from_small_to_large_models():
    names = ["swin_base_patch4_window7_224", "swin_tiny_patch4_window7_224"]
    records = [
        {"case": name, "dtype": dtype, "batch": batch, "variant": "eager", "median_ms": 1.0}
        for name in names
        for dtype in ("bf16", "fp16")
        for batch in (8, 1)
    ]
    rows = make_table({**DOCUMENT, "records": records}).rows
    assert [row[0] for row in rows] == [names[1]] * 4 + [names[0]] * 4
    assert [row[1:3] for row in rows[:4]] == [
        ("fp16", "1"), ("fp16", "8"), ("bf16", "1"), ("bf16", "8"),
    ]  # fmt: skip


def test_a_copy_of_the_same_bytes_is_a_column_and_no_contender():
    measured = {"fastswin": 0.05, "compile": 0.15, "copy": 0.045}
    key = {"case": "window", "dtype": "fp16", "batch": 4096, "direction": "backward"}
    records = [{**key, "variant": name, "median_ms": ms} for name, ms in measured.items()]
    table = make_table({**DOCUMENT, "records": records})
    row = dict(zip(table.header, table.rows[0], strict=True))
    assert (row["speed-up"], row["% of its copy"]) == ("3.00x (compile)", "90")
    assert "copy ms" not in row


def test_text_columns_line_up():
    lines = to_text(make_table(DOCUMENT)).splitlines()
    place = lines[1].index("batch")
    assert [line[place:].split()[0] for line in lines[2:5]] == ["1", "32", "1"]


def test_rich_and_plain_print_the_same_numbers(capsys):
    print_table(make_table(DOCUMENT))
    out = capsys.readouterr().out
    assert "3.05x" in out
    assert "40.00x (eager)" in out


@pytest.mark.parametrize(
    ("words", "kept"),
    [("", 3), (" dtype=fp16", 2), (" dtype=fp16 batch=32", 1), (" batch=1,32 case=swin_s", 1)],
)
def test_write_fills_a_block_and_check_is_content(repository, words, kept):
    readme = repository / "README.md"
    readme.write_text(block("model", words))
    arguments = ["--repository", str(repository)]
    assert report.main(["--check", *arguments]) == 1
    assert report.main(["--write", *arguments]) == 0
    text = readme.read_text()
    assert text.count("\n| swin_") == kept
    assert text.startswith(f"before\n<!-- bench:model:begin{words} -->\n| model |")
    assert text.endswith("<!-- bench:model:end -->\nafter\n")
    assert report.main(["--check", *arguments]) == 0


def test_changed_records_make_a_block_stale(repository, capsys):
    document = repository / "docs" / "benchmarks.md"
    document.write_text(block("model@nvidia-h100-80gb-hbm3"))
    arguments = ["--repository", str(repository)]
    report.main(["--write", *arguments])
    path = repository / "benchmarks" / "results" / "nvidia-h100-80gb-hbm3" / "model.json"
    path.write_text(path.read_text().replace('"median_ms": 1.0', '"median_ms": 1.1'))
    before = document.read_text()
    assert report.main(["--check", *arguments]) == 1
    assert "benchmarks.md: stale" in capsys.readouterr().out
    assert document.read_text() == before


def test_a_suite_without_records_says_so(repository):
    text = report.render(block("train"), repository / "benchmarks" / "results")
    assert "No records for train yet." in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- bench:model:begin -->\n", "lacks its begin or end"),
        (block("model", " colour=red"), "filter must be one of"),
    ],
    ids=["no-end", "unknown-filter"],
)
def test_broken_markers_are_refused(repository, text, message, capsys):
    (repository / "README.md").write_text(text)
    assert report.main(["--write", "--repository", str(repository)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "README.md" in error


def test_chart_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    from fastswin.bench.chart import latency_chart

    path = tmp_path / "chart.png"
    latency_chart(DOCUMENT, path, case="swin_t", dtype="fp16")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ValueError, match="no record of case 'swin_t' with dtype 'int8'"):
        latency_chart(DOCUMENT, path, case="swin_t", dtype="int8")
