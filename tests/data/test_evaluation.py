"""Evaluation counts checked by hand."""

import pytest
import torch

from fastswin.data.preprocess import Preprocess
from fastswin.evaluation import (
    ReferenceModel,
    Score,
    evaluate,
    evaluate_precisions,
    failed_gates,
    merge_scores,
)
from fastswin.models import SwinConfig, SwinTransformer
from fastswin.quant import QuantizationError, calibrate

CONFIG = SwinConfig(
    image_size=16, patch_size=2, window_size=4, embed_dim=16, depths=(2,), num_heads=(2,),
    num_classes=7,
)  # fmt: skip

# six classes; the label's rank in each row is 1, 2, 5, 6
REFERENCE = torch.tensor(
    [
        [9.0, 1.0, 2.0, 3.0, 4.0, 5.0],
        [9.0, 8.0, 2.0, 3.0, 4.0, 5.0],
        [9.0, 8.0, 7.0, 6.0, 5.0, 4.0],
        [9.0, 8.0, 7.0, 6.0, 5.0, 4.0],
    ]
)
LABELS = torch.tensor([0, 1, 4, 5])


def stream(logits, size):
    """Batches whose images carry the row number, so that a forward can look its logits up."""
    rows = torch.arange(len(logits)).float().view(-1, 1, 1, 1)
    return list(zip(rows.split(size), LABELS.split(size), strict=True))


def lookup(logits):
    return lambda images: logits[images.flatten().long()]


@pytest.mark.parametrize("size", [1, 3, 4])
def test_counts(size):
    other = REFERENCE.clone()
    other[0, 1] = 9.5  # now wrong in the first row: the label drops to second
    other[1, 1] = 9.25  # and right in the second
    seen = []
    scores = evaluate(
        {"other": lookup(other)}, lookup(REFERENCE), stream(REFERENCE, size), on_batch=seen.append
    )
    reference, score = scores["reference"].to_dict(), scores["other"].to_dict()
    assert sum(seen) == reference["images"] == score["images"] == 4
    assert reference["top1_percent"] == 25.0
    assert reference["top5_percent"] == 75.0
    assert reference["agreement_percent"] == 100.0
    assert reference["max_abs_diff"] == 0.0
    assert score["top1_percent"] == 25.0
    assert score["top5_percent"] == 75.0
    assert score["agreement_percent"] == 50.0
    assert score["max_abs_diff"] == 8.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_wrong_and_counted(bad):
    broken = REFERENCE.clone()
    broken[0, 3] = bad
    scores = evaluate({"fp16": lookup(broken)}, lookup(REFERENCE), stream(REFERENCE, 4))
    score = scores["fp16"].to_dict()
    assert score["non_finite_images"] == 1
    assert score["top1_percent"] == 0.0
    assert score["top5_percent"] == 50.0
    assert score["agreement_percent"] == 75.0
    assert score["max_abs_diff"] == 0.0
    assert any("NaN" in line for line in failed_gates(scores, points=100))


def test_fewer_than_five_classes():
    logits = torch.tensor([[1.0, 2.0]])
    batches = [(torch.zeros(1, 1, 1, 1), torch.tensor([0]))]
    score = evaluate({}, lookup(logits), batches)["reference"]
    assert (score.correct_top1, score.correct_top5) == (0, 1)


def test_gates():
    reference = Score(images=1000, correct_top1=900, agreeing=1000)
    ok = Score(images=1000, correct_top1=899, agreeing=996)
    assert failed_gates({"reference": reference, "fp16": ok}) == []
    assert failed_gates({"reference": reference, "fp32": ok}) == [
        "fp32: top-1 agreement 99.60 % is below 100.0 %"
    ]
    low = Score(images=1000, correct_top1=898, agreeing=1000)
    assert failed_gates({"reference": reference, "bf16": low}) == [
        "bf16: top-1 differs by -0.20 points from the reference's"
    ]
    better = Score(images=1000, correct_top1=902, agreeing=1000)
    assert "+0.20" in failed_gates({"reference": reference, "bf16": better})[0]


@pytest.mark.parametrize("label", [-1, 6])
def test_labels_outside_the_classes(label):
    batches = [(torch.zeros(1, 1, 1, 1), torch.tensor([label]))]
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 6\)"):
        evaluate({}, lookup(REFERENCE), batches)


def test_another_number_of_classes():
    with pytest.raises(ValueError, match="small"):
        evaluate({"small": lookup(REFERENCE[:, :3])}, lookup(REFERENCE), stream(REFERENCE, 2))


def test_the_name_reference_is_taken():
    with pytest.raises(ValueError, match="reference"):
        evaluate({"reference": lookup(REFERENCE)}, lookup(REFERENCE), [])


def test_no_batches():
    score = evaluate({}, lookup(REFERENCE), [])["reference"].to_dict()
    assert score["images"] == 0
    assert score["top1_percent"] == 0.0


def test_reference_model_is_the_plain_forward_and_keeps_no_graph():
    torch.manual_seed(0)
    model = SwinTransformer(CONFIG).eval()
    images = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        expected = model(images)
    got = ReferenceModel(model, "cpu")(images)
    assert not got.requires_grad
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


def test_precisions_of_a_real_model():
    torch.manual_seed(0)
    model = SwinTransformer(CONFIG)
    with torch.no_grad():
        model.head.weight.mul_(50)  # decided rows: bf16 must not flip them
    pixels = torch.randint(0, 256, (6, 3, 16, 16), dtype=torch.uint8)
    batches = [(Preprocess(image_size=(16, 16))(pixels), torch.arange(6))]
    scores = evaluate_precisions(model, ["fp32", "bf16"], batches, device="cpu")
    assert list(scores) == ["reference", "fp32", "bf16"]
    assert scores["fp32"].agreeing == 6
    assert scores["fp32"].max_abs_diff < 1e-4
    assert 0 < scores["bf16"].max_abs_diff < 0.5


def test_unknown_precision_is_refused_before_any_image_is_read():
    def unread():
        raise AssertionError("read")
        yield

    with pytest.raises(ValueError, match="precision must be one of"):
        evaluate_precisions(SwinTransformer(CONFIG), ["fp8x"], unread(), device="cpu")


def test_quantised_precisions_owe_less_and_may_gain():
    reference = Score(images=1000, correct_top1=900, agreeing=1000)
    for correct, lines in ((950, 0), (897, 0), (896, 1)):
        scores = {"reference": reference, "int8": Score(images=1000, correct_top1=correct)}
        assert len(failed_gates(scores, quantized={"int8"})) == lines
    assert len(failed_gates(scores, quantized={"int8"}, quantized_points=0.4)) == 0


def test_shares_of_several_processes_add_up():
    parts = [
        {"fp32": Score(4, 2, 3, 4, 0.5, 1, seconds=2.0)},
        {"fp32": Score(3, 1, 3, 2, 0.7, 0, seconds=1.0)},
    ]
    assert merge_scores(parts) == {"fp32": Score(7, 3, 6, 6, 0.7, 1, seconds=2.0)}


def test_a_calibrated_precision_beside_an_engine():
    torch.manual_seed(0)
    model = SwinTransformer(CONFIG).eval()
    with torch.no_grad():
        model.head.weight.mul_(50)
    images = torch.randn(6, 3, 16, 16)
    batches = [(images, torch.arange(6))]
    found = {"int8": calibrate(model, images)}
    scores = evaluate_precisions(model, ["int8", "fp32"], batches, device="cpu", calibrations=found)
    assert list(scores) == ["reference", "int8", "fp32"]
    assert 1e-4 < scores["int8"].max_abs_diff < 0.5
    with pytest.raises(QuantizationError, match="'fp8' needs ranges, and this model has int8"):
        evaluate_precisions(model, ["fp8"], batches, device="cpu", calibrations=found)
