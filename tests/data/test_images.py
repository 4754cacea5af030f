"""Photos of every mode and size, and files that are none."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from fastswin.data.images import load_image, load_images, read_image
from fastswin.data.preprocess import Preprocess

RNG = np.random.default_rng(0)
PHOTO = RNG.integers(0, 256, (37, 53, 3), dtype=np.uint8)


def save(path, image, **options):
    image.save(path, **options)
    return path


def close(image, expected, tolerance=0):
    difference = np.abs(np.asarray(image).astype(int) - np.asarray(expected).astype(int))
    assert difference.max() <= tolerance


def test_rgb_is_unchanged(tmp_path):
    image = read_image(save(tmp_path / "a.png", Image.fromarray(PHOTO)))
    assert image.mode == "RGB"
    close(image, PHOTO)


def test_grey_becomes_three_equal_channels(tmp_path):
    grey = PHOTO[..., 0]
    image = read_image(save(tmp_path / "a.png", Image.fromarray(grey)))
    close(image, np.repeat(grey[..., None], 3, axis=2))


def test_grey_model_gets_one_channel(tmp_path):
    path = save(tmp_path / "a.png", Image.fromarray(PHOTO))
    image = read_image(path, grey=True)
    assert image.mode == "L"
    close(image, Image.fromarray(PHOTO).convert("L"))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_become_white(tmp_path, mode):
    rgba = np.dstack([PHOTO, np.full(PHOTO.shape[:2], 255, np.uint8)])
    rgba[:10, :, 3] = 0
    if mode == "P":
        palette = np.ones(PHOTO.shape[:2], np.uint8)
        palette[:10] = 0
        image = Image.fromarray(palette, "P")
        image.putpalette([9, 9, 9, 10, 200, 30])
        path = save(tmp_path / "a.png", image, transparency=0)
    else:
        path = save(tmp_path / "a.png", Image.fromarray(rgba).convert(mode))
    pixels = np.asarray(read_image(path))
    assert (pixels[:10] == 255).all()
    assert not (pixels[10:] == 255).all()
    if mode == "RGBA":
        np.testing.assert_array_equal(pixels[10:], PHOTO[10:])
    if mode == "P":
        assert (pixels[10:] == (10, 200, 30)).all()


def test_half_transparent_is_blended_with_white(tmp_path):
    rgba = np.zeros((4, 4, 4), np.uint8)
    rgba[..., 3] = 128
    close(read_image(save(tmp_path / "a.png", Image.fromarray(rgba))), np.full((4, 4, 3), 127), 1)


def test_sixteen_bits_keep_their_upper_eight(tmp_path):
    deep = (PHOTO[..., 0].astype(np.uint16) * 257).astype(np.uint16)
    path = save(tmp_path / "a.png", Image.fromarray(deep))
    close(read_image(path), np.repeat(PHOTO[..., :1], 3, axis=2))


def test_float_tiff(tmp_path):
    path = save(tmp_path / "a.tiff", Image.fromarray(PHOTO[..., 0].astype(np.float32) / 255))
    close(read_image(path), np.repeat(PHOTO[..., :1], 3, axis=2))


def test_cmyk(tmp_path):
    cmyk = Image.new("CMYK", (20, 10), (0, 255, 255, 0))
    pixels = np.asarray(read_image(save(tmp_path / "a.tiff", cmyk)))
    assert (pixels == (255, 0, 0)).all()


def test_black_and_white(tmp_path):
    bilevel = Image.fromarray(PHOTO[..., 0] > 127)
    close(read_image(save(tmp_path / "a.png", bilevel)), bilevel.convert("RGB"))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone(tmp_path, orientation):
    upright = np.zeros((40, 24, 3), np.uint8)
    upright[:20, :12] = (255, 0, 0)
    upright[20:, 12:] = (0, 0, 255)
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: np.rot90(upright, 1),
        7: upright.swapaxes(0, 1)[::-1, ::-1],
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(tmp_path / "a.png", Image.fromarray(np.ascontiguousarray(stored)), exif=exif)
    close(read_image(path), upright)


def test_first_frame_of_an_animation(tmp_path):
    frames = [Image.new("L", (8, 8), value) for value in (40, 200)]
    path = save(tmp_path / "a.gif", frames[0], save_all=True, append_images=frames[1:])
    close(read_image(path), np.full((8, 8, 3), 40))


@pytest.mark.parametrize(
    "size", [(37, 53), (53, 37), (224, 224), (500, 333), (248, 400), (1, 1), (3, 900)]
)
@pytest.mark.parametrize(("side", "ratio"), [(224, 0.9), (96, 1.0)], ids=["crop-0.9", "crop-1.0"])
def test_geometry_is_timms(tmp_path, size, side, ratio):
    from timm.data import create_transform

    pixels = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    path = save(tmp_path / "a.png", Image.fromarray(pixels))
    transform = create_transform(
        (3, side, side), is_training=False, interpolation="bicubic", crop_pct=ratio
    )
    preprocess = Preprocess(image_size=(side, side), crop_ratio=ratio)
    ours = preprocess(load_image(path, preprocess)[None])[0]
    torch.testing.assert_close(ours, transform(Image.fromarray(pixels)), atol=1e-5, rtol=0)


def test_non_square_models_get_their_shape(tmp_path):
    path = save(tmp_path / "a.png", Image.fromarray(PHOTO))
    assert load_image(path, Preprocess(image_size=(64, 32))).shape == (3, 64, 32)
    grey = Preprocess(image_size=(28, 30), mean=(0.5,), std=(0.5,))
    assert load_image(path, grey).shape == (1, 28, 30)


def test_batches_keep_their_order(tmp_path):
    paths = [save(tmp_path / f"{v}.png", Image.new("L", (9, 7), v)) for v in (10, 20, 30)]
    batch = load_images(paths, Preprocess(image_size=(8, 8)))
    assert batch.shape == (3, 3, 8, 8)
    assert batch[:, 0, 0, 0].tolist() == [10, 20, 30]
    assert load_images([], Preprocess(image_size=(8, 8))).shape == (0, 3, 8, 8)


def encoded(kind):
    buffer = io.BytesIO()
    Image.fromarray(PHOTO).save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "BMP"])
@pytest.mark.parametrize("part", [0.5, 0.9])
def test_truncated_file_is_refused_by_name(tmp_path, kind, part):
    content = encoded(kind)
    path = tmp_path / f"cut.{kind.lower()}"
    path.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(ValueError, match="cut") as caught:
        read_image(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"\0" * 100],
    ids=["empty", "text", "head", "0"],
)
def test_non_image_is_refused_by_name(tmp_path, content):
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"photo\.jpg"):
        read_image(path)


def test_missing_file_and_folder(tmp_path):
    for path in (tmp_path / "absent.png", tmp_path):
        with pytest.raises(FileNotFoundError, match="no such image file"):
            read_image(path)
