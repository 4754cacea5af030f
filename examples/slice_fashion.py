"""Cut the Fashion-MNIST slices that ship with fastswin: the first 2,000 test images, for accuracy
and parity, and the first 512 training images, for calibration.

    python examples/slice_fashion.py --data /usr/share/datasets/fashion-mnist
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fastswin.data.atomic import replacing
from fastswin.data.fashion_mnist import ASSETS, DEBIAN_FOLDER, SLICE_STEMS, load_split
from fastswin.data.idx import idx_bytes

TEST_IMAGES, CALIBRATION_IMAGES = 2000, 512


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DEBIAN_FOLDER, help="folder of the IDX files")
    parser.add_argument("--out", type=Path, default=ASSETS, help="folder for the slices")
    options = parser.parse_args(arguments)
    for name, split, count in (
        ("test", "test", TEST_IMAGES),
        ("calibration", "train", CALIBRATION_IMAGES),
    ):
        images, labels = load_split(options.data, split)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            path = options.out / f"{SLICE_STEMS[name]}-{kind}-ubyte.gz"
            with replacing(path) as temporary:
                temporary.write_bytes(idx_bytes(array[:count]))
            print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
