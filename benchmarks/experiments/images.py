"""FashionMNIST and CIFAR-10 as arrays, from files that the reader has; nothing is downloaded.

FashionMNIST: Debian's package `dataset-fashion-mnist`, or a folder with its four idx files.
CIFAR-10: a folder with the official batches (`cifar-10-batches-py`), or an npz of JPEG bytes,
offsets and labels (lossy: its images differ from the official ones by the compression).
"""

import gzip
import io
import itertools
import pathlib
import pickle
import struct

import numpy as np

FASHION = pathlib.Path("/usr/share/datasets/fashion-mnist")
CIFAR_MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)
CIFAR_STD = np.array([0.2470, 0.2435, 0.2616], np.float32)


def fashion_mnist(folder=FASHION):
    """Training and test images (n, 28, 28, 1) in [0, 1], float32, and labels (n,), int32."""
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"No FashionMNIST in {folder}: install Debian's package dataset-fashion-mnist, or pass "
            "--data with the folder of its four idx files."
        )
    parts = []
    for name in ("train", "t10k"):
        images = _idx(folder / f"{name}-images-idx3-ubyte")
        labels = _idx(folder / f"{name}-labels-idx1-ubyte")
        parts.append((images[..., None].astype(np.float32) / 255, labels.astype(np.int32)))
    return parts


def cifar10(path):
    """Training and test images (n, 32, 32, 3), uint8, and labels (n,), int32; and their source."""
    path = pathlib.Path(path)
    if path.is_dir():
        batches = [_batch(path / f"data_batch_{number}") for number in range(1, 6)]
        train = tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))
        return [train, _batch(path / "test_batch")], "official batches"
    if not path.is_file():
        raise FileNotFoundError(
            f"No CIFAR-10 at {path}: pass --data with the folder of the official batches "
            "(cifar-10-batches-py), or an npz of JPEG bytes."
        )
    stored = np.load(path, allow_pickle=False)
    return [_jpegs(stored, name) for name in ("train", "test")], f"JPEG bytes ({path.name})"


def standardised(images):
    """CIFAR-10 images as the network takes them, float32."""
    return (images.astype(np.float32) / 255 - CIFAR_MEAN) / CIFAR_STD


def _idx(path):
    packed = path.with_name(path.name + ".gz")
    content = gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()
    _, kind, dimensions = struct.unpack_from(">HBB", content)
    if kind != 8:
        raise ValueError(f"{path} holds type {kind}, not unsigned bytes (8)")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def _batch(path):
    # The official files are pickles: read them only from where they were published.
    with path.open("rb") as file:
        batch = pickle.load(file, encoding="bytes")
    images = batch[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, np.asarray(batch[b"labels"], np.int32)


def _jpegs(stored, name):
    from PIL import Image

    content, offsets = stored[f"{name}_jpeg"].tobytes(), stored[f"{name}_offsets"]
    images = np.stack(
        [
            np.asarray(Image.open(io.BytesIO(content[start:end])).convert("RGB"))
            for start, end in itertools.pairwise(offsets)
        ]
    )
    return images, stored[f"{name}_labels"].astype(np.int32)
