"""Evaluation counts checked by hand."""

import pytest
import torch

from fastswin.data.preprocess import Preprocess
from fastswin.evaluation import ReferenceModel, Score, evaluate, evaluate_precisions, failed_gates
from fastswin.models import SwinConfig, SwinTransformer

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
