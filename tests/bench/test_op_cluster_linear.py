"""The bench of products in clusters: its forms, their check and its command, on a CPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fastswin import ops
from fastswin.bench import op_cluster_linear as bench
from fastswin.bench.op_cluster_linear import compile_form, lines, main, parse_stages, run
from fastswin.bench.op_cluster_linear_problems import (
    LAYERS,
    STAGES,
    Product,
    Shape,
    forms,
    others,
)
from fastswin.ops.cluster_linear.config import ClusterLinearConfig

CPU = torch.device("cpu")
TILES = ClusterLinearConfig(64, 64, 1, 2)
TINY = [Shape(layer, 20, 128) for layer in LAYERS]
ALL = [Shape(layer, *stage) for stage in STAGES for layer in LAYERS]

real_linear = ops.linear


def linear_without_clusters(*args, **kwargs):
    """The reference in the kernel's place, which looks at the tiles all the same."""
    if isinstance(kwargs.get("config"), ClusterLinearConfig):
        kwargs["impl"] = "reference"
    return real_linear(*args, **kwargs)


@pytest.fixture
def no_clusters(monkeypatch):
    monkeypatch.setattr(ops, "linear", linear_without_clusters)


class Pool:
    """In a compile pool's place: says of each job what it was told, and notes it."""

    def __init__(self, why: dict | None = None) -> None:
        self.why, self.jobs = why or {}, []

    def start(self, job) -> None:
        self.jobs.append(job)

    def error(self, job, timeout_s: float) -> str | None:
        assert job in self.jobs
        return self.why.get(job)


@pytest.mark.parametrize("shape", TINY, ids=str)
@torch.no_grad()
def test_every_form_is_right(shape, no_clusters):
    product = Product(shape, CPU, 2)
    for form in (*others(shape), TILES):
        assert product.check(form) == ""
    product.reset(TILES)
    product.run(TILES, 0)
    first = product.out.clone()
    product.reset(TILES)
    product.run(TILES, 1)  # by other weights
    assert not torch.equal(product.out, first)
    assert (product.stats is None) == shape.normalised


def change(name: str, monkeypatch, wrong) -> None:
    real = getattr(ops, name)
    monkeypatch.setattr(ops, name, lambda *args, **kwargs: wrong(real, args, kwargs))


def larger(real, args, kwargs):
    return kwargs["out"].mul_(1.1) if real(*args, **kwargs) is not None else None


def wrong_stats(real, args, kwargs):
    y = real(*args, **kwargs)
    kwargs["stats_out"][1, 0, 3] *= 1.01
    return y


def unwritten_stats(real, args, kwargs):
    return real(*args, **{**kwargs, "stats_out": None})


@pytest.mark.parametrize("wrong", [larger, wrong_stats, unwritten_stats])
@pytest.mark.parametrize("form", ["one-shot", TILES], ids=["one-shot", "clusters"])
@torch.no_grad()
def test_a_wrong_product_is_caught(wrong, form, no_clusters, monkeypatch):
    product = Product(Shape("proj", 20, 128), CPU, 1)
    change("linear", monkeypatch, wrong)
    assert ("error" if wrong is larger else "statistics are off") in product.check(form)


@torch.no_grad()
def test_runs_that_differ_a_missing_residual_and_a_wrong_norm_are_caught(no_clusters, monkeypatch):
    product = Product(Shape("fc2", 20, 128), CPU, 1)
    flips = iter([0.0, 2.0**-9, 0.0])

    def flip(real, args, kwargs):
        y = real(*args, **kwargs)
        y[0, 0] += next(flips)
        return y

    with monkeypatch.context() as context:
        change("linear", context, flip)
        assert product.check(TILES) == "runs differ"
    with monkeypatch.context() as context:
        change("linear", context, lambda real, a, kw: real(*a, **{**kw, "residual": None}))
        assert "error" in product.check(TILES)
    change("add_split_k", monkeypatch, lambda real, a, kw: 1.1 * real(*a, **kw))
    assert "error" in product.check("split_k + join")


@torch.no_grad()
def test_lines_are_sorted_and_name_what_failed(no_clusters, monkeypatch):
    """Times by the order in which they are asked for; the best launch without clusters is 1."""
    shape, fail, wrong = TINY[0], ClusterLinearConfig(64, 128, 1, 2), "layer_norm + library"
    pool, times = Pool({(shape, fail): "too much memory"}), iter([3.0, 2.0, 1.5])
    shown = [*others(shape), TILES, fail, ClusterLinearConfig(16, 64, 1, 2)]
    monkeypatch.setattr(bench, "forms", lambda shape: shown)
    real = Product.check
    monkeypatch.setattr(bench, "make_flush", lambda device: None)
    monkeypatch.setattr(Product, "latency_us", lambda *_: next(times))
    monkeypatch.setattr(Product, "check", lambda s, f: "no" if f == wrong else real(s, f))
    for form in shown:
        pool.start((shape, form))
    found = list(lines(shape, CPU, pool, lambda: 60.0))
    assert len(found) == len(shown)
    us = [float(line.split()[2]) for line in found if " us" in line]
    assert us == [1.5, 2.0, 3.0]
    assert "3.00 us, 1.00x layer_norm + linear" in "\n".join(found)
    assert found[-2:] == [
        "fc1 20x128: layer_norm + library: WRONG no",
        "fc1 20x128: 64x128 splits 1, steps of 64, ring 2 of 2, 4 programs: FAILED too much memory",
    ]


@pytest.mark.parametrize("found", ["proj 20x128: WRONG", "proj 20x128: FAILED", "fine"])
def test_the_run_notes_lines_and_whether_they_are_right(found, tmp_path):
    shapes, pool, said = TINY[2:], Pool(), []
    with mock.patch.object(bench, "lines", return_value=[found]):
        assert run(CPU, tmp_path, shapes, 60.0, pool, said.append) == (found == "fine")
    assert said == [found] * 2
    assert (tmp_path / "cluster_linear.txt").read_text() == f"{found}\n" * 2
    assert pool.jobs == [(shape, form) for shape in shapes for form in forms(shape)]


def test_what_breaks_is_one_line_of_its_shape(tmp_path):
    said = []
    with mock.patch.object(bench, "lines", side_effect=RuntimeError("no memory\nmore")):
        assert not run(CPU, tmp_path, TINY[:1], 60.0, Pool(), said.append)
    assert said == ["fc1 20x128: FAILED RuntimeError: no memory"]


def test_a_deadline_that_is_over_skips(tmp_path, monkeypatch):
    said = []
    assert run(CPU, tmp_path, TINY, -1.0, Pool(), said.append)
    assert said == [f"{shape}: skipped, out of time" for shape in TINY]
    monkeypatch.setattr(bench, "make_flush", lambda device: None)
    pool = Pool()
    for form in forms(TINY[3]):
        pool.start((TINY[3], form))
    found = list(lines(TINY[3], CPU, pool, lambda: 0.0))
    assert found == ["qkv 20x128: layer_norm + linear: skipped with what follows, out of time"]


def test_a_form_that_does_not_compile_says_why():
    with mock.patch.object(bench, "Product", side_effect=ValueError("block_m must be 64\nmore")):
        assert compile_form((TINY[0], TILES)) == "ValueError: block_m must be 64"


def test_a_form_is_compiled_and_not_run():
    """Everything that it launches, in the order of the calls."""
    from fastswin._triton import launch

    seen = []
    with mock.patch.object(bench, "Product") as product:
        product.return_value.run.side_effect = lambda *_: seen.append(launch.compiles_only())
        assert compile_form((TINY[0], TILES)) is None
    assert seen == [True]
    assert product.call_args.args == (TINY[0], torch.device("cuda"), 1)


def test_stages_are_parsed():
    assert parse_stages("784x192,49x768") == [(784, 192), (49, 768)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "784"], "--shapes must be rows x channels such as 784x192"),
        (["--shapes", "784x192x3"], "got '784x192x3'"),
        (["--shapes=-1x192"], "got '-1x192'"),
        (["--shapes", ""], "--shapes must be rows x channels"),
        (["--shapes", "0x192"], "--shapes must be of rows and 128, 192"),
        (["--shapes", "49x100"], "--shapes must be of rows and 128, 192"),
        (["--layers", "fc3"], "--layers must be some of fc1,fc2,proj,qkv, got 'fc3'"),
        (["--layers", ","], "--layers must be some of"),
        (["--workers", "0"], "--workers must be at least 1"),
    ],
    ids=str,
)
def test_arguments_are_checked(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("right", [True, False])
def test_the_command_runs_what_it_is_told(right, tmp_path):
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(bench, "why_no_cluster_linear", return_value=None),
        mock.patch.object(bench, "CompilePool") as pool,
        mock.patch.object(bench, "run", return_value=right) as ran,
    ):
        arguments = ["--out", str(tmp_path), "--shapes", "49x768", "--layers", "qkv,fc2"]
        assert main([*arguments, "--deadline-s", "9", "--workers", "3"]) == (0 if right else 1)
    shapes = [Shape("qkv", 49, 768), Shape("fc2", 49, 768)]
    assert ran.call_args.args[1:4] == (tmp_path, shapes, 9.0)
    pool.assert_called_once_with(3, compile_form)
    pool.return_value.close.assert_called_once_with()


def test_without_a_gpu_or_on_another_it_says_so(capsys):
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert main([]) == 2
    assert "there is no GPU" in capsys.readouterr().out
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(bench, "why_no_cluster_linear", return_value="another card"),
    ):
        assert main([]) == 2
    assert "cannot run: another card" in capsys.readouterr().out
