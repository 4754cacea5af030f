"""The weights in the repository: right labels, and the engine's answers are the reference's."""

import torch

from fastswin.data.fashion_mnist import PREPROCESS, class_names
from fastswin.data.shipped import shipped_checkpoint
from fastswin.data.source import open_source
from fastswin.data.test_set import shipped_test_set
from fastswin.evaluation import evaluate_precisions, failed_gates

torch.set_num_threads(2)


def test_file_is_small_and_describes_itself():
    assert shipped_checkpoint("swin_fashion_mnist").stat().st_size <= 8e6
    source = open_source("swin_fashion_mnist")
    assert source.preprocess == PREPROCESS
    assert source.class_names == list(class_names())


def test_accuracy_and_parity_on_the_first_200_images():
    source = open_source("swin_fashion_mnist")
    batches = shipped_test_set(source, limit=200).batches(50)
    scores = evaluate_precisions(source.model, ["fp32"], batches, device="cpu")
    # three standard errors (5 points on 200 images) under the 93.5 % that the whole set must reach
    assert scores["fp32"].percent(scores["fp32"].correct_top1) >= 88.5
    assert scores["fp32"].max_abs_diff < 1e-4
    assert failed_gates(scores) == []
