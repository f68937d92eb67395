"""lightly's SwAV example on dipole: two large and six small crops, whose codes predict one another.

python examples/swav.py
"""

import argparse

import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dipole.vision import Augment, SwAV

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Digits(Dataset):
    """Images of 8 x 8 pixels: views of each, and its class."""

    def __init__(self, transform):
        self.data, self.transform = load_digits(), transform

    def __len__(self):
        return len(self.data.target)

    def __getitem__(self, row):
        image = Image.fromarray((self.data.images[row] * 15).astype("uint8"))
        return self.transform(image), self.data.target[row]


def build(backbone):
    return SwAV(backbone, objective="swav(prototypes=512)").to(DEVICE)


def train(model, loader, epochs=10):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    losses = []
    for epoch in range(epochs):
        for views, _ in loader:
            loss = model([view.to(DEVICE) for view in views])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.after_step()
            losses.append(loss.item())
        print(f"epoch: {epoch:>02}, loss: {sum(losses[-len(loader) :]) / len(loader):.5f}")
    return losses


def main(epochs=10):
    backbone = nn.Sequential(nn.Conv2d(1, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
    data = Digits(Augment("swav", size=16, small_size=8, flip=0))
    return train(build(backbone), DataLoader(data, batch_size=256, shuffle=True, drop_last=True), epochs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    main(**vars(parser.parse_args()))
