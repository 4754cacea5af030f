"""Training with quantisation in the loop."""

import copy

import pytest
import torch
import torch.nn.functional as F
from quant_cases import images_like, tiny
from swin_references import KIND_IDS, KINDS, build, images_of

from fastswin import quant
from fastswin.models import from_live
from fastswin.quant.fake_quant import quantize
from fastswin.quant.qat import twin


def test_gradients_pass_straight_through_inside_the_range_and_stop_outside():
    x = torch.tensor([-3.0, -1.0, 0.26, 0.9, 3.0], requires_grad=True)
    upstream = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    for format, inverse in (("int8", 100.0), ("fp8", 300.0)):
        (grad,) = torch.autograd.grad(quantize(x, inverse, format), x, upstream)
        expected = torch.tensor([0.0, 2.0, 3.0, 4.0, 0.0]) * inverse
        torch.testing.assert_close(grad, expected, rtol=0, atol=0)


def test_rounding_is_half_to_even_and_symmetric():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.6, 400.0, -400.0])
    found = quantize(x, 1.0, "int8")
    assert found.tolist() == [0.0, 2.0, 2.0, 0.0, -2.0, 127.0, 127.0, -127.0]
    e4m3 = quantize(torch.tensor([1.0625, 447.0, 1e4, -1e4, 2.0**-10]), 1.0, "fp8")
    assert e4m3.tolist() == [1.0, 448.0, 448.0, -448.0, 0.0]


@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
def test_training_recovers_what_coarse_quantisation_lost(version):
    """Ranges six times too wide leave 5.4 bits; a few steps towards the teacher bring some back."""
    torch.manual_seed(0)
    teacher = tiny(version, image_size=(32, 32))
    student = copy.deepcopy(teacher)
    images = images_like(teacher, 8)
    calibration = quant.calibrate(student, images)
    coarse = calibration.to_dict()
    for entry in coarse["layers"].values():
        entry["input_amax"] *= 6
    calibration = quant.Calibration.from_dict(coarse, student)
    qat = quant.QatModel(student, calibration)
    with torch.no_grad():
        target = teacher(images)
        before = F.mse_loss(qat(images), target).item()
    optimizer = torch.optim.SGD(qat.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(12):
        loss = F.mse_loss(qat(images), target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(qat.parameters(), 1.0)
        optimizer.step()
    trained = [n for n, p in student.named_parameters() if p.grad is not None and p.grad.any()]
    assert {n.rpartition(".")[2] for n in trained} >= {"weight", "bias"}
    with torch.no_grad():
        fake = qat.eval()(images)
    assert F.mse_loss(fake, target).item() < 0.8 * before
    # the integer reference of the trained weights is what was trained
    finished = qat.finish()
    with pytest.raises(quant.QuantizationError, match="made for other weights"):
        quant.QuantizedSwin(student, calibration)
    integer = quant.QuantizedSwin(student, finished)(images)
    torch.testing.assert_close(integer, fake, rtol=0, atol=0.02 * float(fake.abs().max()))
    first = "layers.0.blocks.0.attn.qkv"
    assert finished.layers[first].input_amax == calibration.layers[first].input_amax
    assert not torch.equal(
        finished.layers[first].weight_amax, calibration.layers[first].weight_amax
    )


@pytest.mark.parametrize(("framework", "version"), KINDS, ids=KIND_IDS)
def test_a_live_model_is_trained_through_its_memory(framework, version):
    live = build(framework, version)
    if framework == "huggingface":  # its q, k and v are three tensors
        with pytest.raises(ValueError, match="cannot be shared with"):
            twin(live)
        return
    images = images_of()
    calibration = quant.calibrate(from_live(live), images)
    qat = quant.QatModel(live.train(), calibration)
    assert qat.training
    before = copy.deepcopy(live.state_dict())
    optimizer = torch.optim.SGD(qat.parameters(), lr=1e-3)
    F.cross_entropy(qat(images), torch.arange(3)).backward()
    optimizer.step()
    changed = [n for n, t in live.state_dict().items() if not torch.equal(t, before[n])]
    assert len(changed) >= len(list(qat.parameters())) - 8  # norms at a zero gradient may stay
    live.eval()
    with torch.no_grad():
        torch.testing.assert_close(qat.model.eval()(images), live(images), rtol=0, atol=1e-4)
    quant.QuantizedSwin(from_live(live), qat.finish())  # fingerprints agree


def test_distillation_loss_by_hand():
    student = torch.tensor([[1.0, 0.0], [0.0, 2.0]], requires_grad=True)
    teacher = torch.tensor([[2.0, 0.0], [0.0, 1.0]], requires_grad=True)
    labels = torch.tensor([0, 1])
    p, q = (teacher / 2).softmax(1), (student / 2).softmax(1)
    divergence = 4 * (p * (p / q).log()).sum(1).mean()
    expected = 0.25 * F.cross_entropy(student, labels) + 0.75 * divergence
    found = quant.distillation_loss(student, teacher, labels, temperature=2.0, teacher_weight=0.75)
    torch.testing.assert_close(found, expected)
    found.backward()
    assert student.grad.abs().sum() > 0
    assert teacher.grad is None
    alone = quant.distillation_loss(student, teacher, temperature=2.0)
    torch.testing.assert_close(alone, divergence)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"temperature": 0.0}, "temperature"), ({"teacher_weight": 1.5}, "teacher_weight")],
    ids=["temperature", "teacher_weight"],
)
def test_illegal_loss_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        quant.distillation_loss(torch.zeros(1, 2), torch.zeros(1, 2), **settings)


def test_an_accelerated_timm_model_is_trained_through_its_memory():
    from fastswin.accelerate import accelerate

    live, images = build("timm", 1), images_of()
    calibration = quant.calibrate(from_live(live), images)
    accelerate(live)  # in place
    qat = quant.QatModel(live.train(), calibration)
    optimizer = torch.optim.SGD(qat.parameters(), lr=1e-2)
    F.cross_entropy(qat(images), torch.arange(3)).backward()
    with torch.no_grad():
        before = live.eval()(images)
        optimizer.step()
        after = live(images)
        assert (after - before).abs().max() > 1e-2
        torch.testing.assert_close(qat.model.eval()(images), after, rtol=0, atol=1e-4)
