"""Trains the ResNet-9 without BatchNorm of the CIFAR-10 experiment; weights go to an npz.

In torch, because its bfloat16 convolutions take a seventh of the time of XLA's on a CPU; the
weights are read by JAX (networks.py) and by laplace-torch alike. The loss is the cross-entropy
with weight decay, no label smoothing, so that the weights are a mode of a posterior. One checkpoint
an epoch: run the same command again after an interruption.

    python benchmarks/experiments/train_cifar10.py --data CIFAR --cache ~/.cache/pnkrylov
"""

import argparse
import json
import math
import pathlib
import time

import numpy as np
import torch
from images import cifar10, standardised
from torch import nn
from tqdm import tqdm

BATCH, MOMENTUM = 128, 0.9
WIDTHS = (32, 64, 128, 180)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        # The branch starts at zero: a network without normalisation trains from the identity.
        nn.init.zeros_(self.second.weight)

    def forward(self, x):
        return torch.relu(x + self.second(torch.relu(self.first(x))))


def network():
    """Eight convolutions and a linear layer, 671,622 parameters."""
    a, b, c, d = WIDTHS
    return nn.Sequential(
        nn.Conv2d(3, a, 3, padding=1), nn.ReLU(),
        nn.Conv2d(a, b, 3, stride=2, padding=1), nn.ReLU(),
        Residual(b),
        nn.Conv2d(b, c, 3, stride=2, padding=1), nn.ReLU(),
        Residual(c),
        nn.Conv2d(c, d, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(d, 10),
    )  # fmt: skip


def initialise(model):
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif "second" not in name:
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")
    nn.init.normal_(model[-1].weight, std=0.01)


def augmented(images, generator):
    """Random crops of images padded by four, random flips, and a hidden square of eight."""
    count = len(images)
    padded = nn.functional.pad(images, (4, 4, 4, 4))
    rows = torch.randint(0, 9, (count, 1), generator=generator) + torch.arange(32)[None, :]
    columns = torch.randint(0, 9, (count, 1), generator=generator) + torch.arange(32)[None, :]
    flip = torch.rand(count, generator=generator) < 0.5
    columns = torch.where(flip[:, None], columns.flip(1), columns)
    index = torch.arange(count)[:, None, None]
    cropped = padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]]
    centre = torch.randint(0, 32, (count, 2), generator=generator)
    grid = torch.arange(32)
    inside = [(grid[None, :] - centre[:, axis, None]).abs() < 4 for axis in (0, 1)]
    hidden = inside[0][:, :, None] & inside[1][:, None, :]
    return cropped.masked_fill(hidden[..., None], 0.0).permute(0, 3, 1, 2)


def rate(epochs_done, cycles, peak):
    """Linear warm-up over a tenth of a cycle, then a cosine to zero; each cycle at half the rate.

    Args:
        epochs_done: a fractional number.
        cycles: epochs of every cycle.
        peak: the rate of the first cycle.
    """
    start = 0
    for cycle in cycles[:-1]:
        if epochs_done < start + cycle:
            break
        start, peak = start + cycle, peak / 2
    else:
        cycle = cycles[-1]
    part, warm = (epochs_done - start) / cycle, 0.1
    if part < warm:
        return peak * part / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (part - warm) / (1 - warm)))


@torch.no_grad()
def accuracy(model, images, labels):
    model.eval()
    hits = [
        (model(images[start : start + 500]).argmax(1) == labels[start : start + 500]).sum().item()
        for start in range(0, len(images), 500)
    ]
    model.train()
    return sum(hits) / len(images)


def epoch(model, optimiser, images, labels, number, options):
    generator = torch.Generator().manual_seed(1000 * options.seed + number)
    order = torch.randperm(len(images), generator=generator)
    batches = len(images) // BATCH
    total = 0.0
    total_epochs = sum(options.cycles)
    for index in tqdm(range(batches), desc=f"epoch {number + 1}/{total_epochs}", mininterval=10):
        for group in optimiser.param_groups:
            group["lr"] = rate(number + (index + 1) / batches, options.cycles, options.rate)
        chosen = order[index * BATCH : (index + 1) * BATCH]
        inputs = augmented(images[chosen], generator)
        inputs = inputs.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs).float(), labels[chosen])
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimiser.step()
        total += loss.item()
    return total / batches


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of batches, or npz of JPEG bytes")
    parser.add_argument("--cache", type=pathlib.Path, required=True, help="folder for the weights")
    parser.add_argument("--cycles", type=int, nargs="+", default=[24, 12], help="epochs of each")
    parser.add_argument("--rate", type=float, default=0.06)
    parser.add_argument("--decay", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    (train, test), source = cifar10(options.data)
    images, held_out = (
        torch.from_numpy(standardised(part[0])).permute(0, 3, 1, 2) for part in (train, test)
    )
    labels, held_labels = (torch.from_numpy(part[1]).long() for part in (train, test))
    model = network().to(memory_format=torch.channels_last)
    initialise(model)
    optimiser = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=MOMENTUM, nesterov=True, weight_decay=options.decay
    )
    options.cache.mkdir(parents=True, exist_ok=True)
    checkpoint, done, log = options.cache / "cifar10_training.pt", 0, []
    if checkpoint.exists():
        stored = torch.load(checkpoint)
        model.load_state_dict(stored["model"])
        optimiser.load_state_dict(stored["optimiser"])
        done, log = stored["done"], stored["log"]
    for number in range(done, sum(options.cycles)):
        started = time.perf_counter()
        loss = epoch(model, optimiser, images, labels, number, options)
        log.append(
            {
                "epoch": number + 1,
                "loss": loss,
                "accuracy": accuracy(model, held_out, held_labels),
                "seconds": time.perf_counter() - started,
            }
        )
        print(json.dumps(log[-1]), flush=True)
        state = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
        partial = checkpoint.with_suffix(".part")
        torch.save({**state, "done": number + 1, "log": log}, partial)
        partial.replace(checkpoint)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    about = {"data": source, "log": log, "arguments": {k: str(v) for k, v in vars(options).items()}}
    np.savez(options.cache / "cifar10.npz", about=json.dumps(about), **weights)


if __name__ == "__main__":
    main()
