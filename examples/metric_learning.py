"""pytorch-metric-learning's MNIST example on dipole: a supervised loop, then the nearest neighbours of the test part.

    python examples/metric_learning.py

With torchvision, `MNIST(".", transform=ToTensor())` takes the place of the digits.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dipole
from dipole.evaluation import knn_probe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train(model: nn.Module, loss_func: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train for an epoch, and give the loss of each step."""
    losses = []
    for data, labels in loader:
        optimizer.zero_grad()
        pairs = dipole.Pairs.from_labels(model(data.to(DEVICE)), labels.to(DEVICE))
        loss = loss_func(pairs).loss  # was loss_func(embeddings, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def test(model: nn.Module, train_set: tuple[Tensor, Tensor], test_set: tuple[Tensor, Tensor]) -> float:
    """Give the accuracy of the nearest neighbour in the training part."""
    embedded = [(model(data.to(DEVICE)), labels) for data, labels in (train_set, test_set)]
    return knn_probe(*embedded[0], *embedded[1], k=1).accuracy


def main(epochs: int = 5, objective: str = "supcon(temperature=0.1)") -> float:
    """Train on the digits, and give the accuracy."""
    torch.manual_seed(0)
    digits = load_digits()
    data, labels = torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
    train_set, test_set = (data[:1200], labels[:1200]), (data[1200:], labels[1200:])
    loader = DataLoader(TensorDataset(*train_set), batch_size=256, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128)).to(DEVICE)
    loss_func = dipole.objective(objective, dim=128).to(DEVICE)
    optimizer = torch.optim.Adam([*model.parameters(), *loss_func.parameters()], lr=1e-3)
    accuracy = test(model, train_set, test_set)
    for epoch in range(1, epochs + 1):
        losses = train(model, loss_func, loader, optimizer)
        accuracy = test(model, train_set, test_set)
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}, accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--objective", default="supcon(temperature=0.1)")
    main(**vars(parser.parse_args()))
