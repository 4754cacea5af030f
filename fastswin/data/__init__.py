"""Data: photos, image folders, Fashion-MNIST and the preprocessing that travels with weights."""

from fastswin.data.fashion_mnist import fashion_mnist_slice
from fastswin.data.preprocess import Preprocess

__all__ = ["Preprocess", "fashion_mnist_slice"]
