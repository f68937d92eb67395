"""Networks and Adam written out as formulas on plain tensors, for the tests of an agent's updates."""

import torch
import torch.nn.functional as F


def positive(x):
    """Rectifier with gradient 0 at 0, where delta-orthogonal layers start with many exact zeros."""
    return x * (x > 0)


def normalised(rest, h):
    """Linear, then layer normalisation."""
    weight, bias, scale, offset = rest
    z = h @ weight.T + bias
    mean, variance = z.mean(1, keepdim=True), z.var(1, unbiased=False, keepdim=True)
    return (z - mean) / torch.sqrt(variance + 1e-5) * scale + offset


class Encoder:
    """Weights as a list of tensors: four convolutions, linear, layer normalisation."""

    def __init__(self, module, offset=0.0):
        self.offset = offset
        self.convs = [(c.weight.detach().clone(), c.bias.detach().clone()) for c in module.convs]
        self.rest = [p.detach().clone() for p in (module.fc.weight, module.fc.bias, module.ln.weight, module.ln.bias)]

    def tensors(self):
        return [t for pair in self.convs for t in pair] + self.rest

    def track(self):
        for tensor in self.tensors():
            tensor.requires_grad_()
        return self

    def features(self, images):
        x = images.double() / 255 - self.offset
        for stride, (weight, bias) in zip([2, 1, 1, 1], self.convs, strict=True):
            x = positive(F.conv2d(x, weight, bias, stride=stride))
        return x.reshape(len(x), -1)

    def head(self, h):
        return normalised(self.rest, h)

    def __call__(self, images):
        return self.head(self.features(images))


class MLP:
    def __init__(self, *linears):
        self.layers = [(m.weight.detach().clone(), m.bias.detach().clone()) for m in linears]

    def tensors(self):
        return [t for pair in self.layers for t in pair]

    def __call__(self, x):
        for index, (weight, bias) in enumerate(self.layers):
            x = x @ weight.T + bias
            x = positive(x) if index < len(self.layers) - 1 else x
        return x


def linears(module):
    return [m for m in module.modules() if isinstance(m, torch.nn.Linear)]


class Adam:
    """Kingma & Ba 2015, bias corrected."""

    def __init__(self, parameters, rate, beta):
        self.parameters, self.rate, self.betas, self.step_count = parameters, rate, (beta, 0.999), 0
        self.first = [torch.zeros_like(p) for p in parameters]
        self.second = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self, gradients):
        self.step_count += 1
        for p, g, m, v in zip(self.parameters, gradients, self.first, self.second, strict=True):
            m.mul_(self.betas[0]).add_((1 - self.betas[0]) * g)
            v.mul_(self.betas[1]).add_((1 - self.betas[1]) * g * g)
            corrected = m / (1 - self.betas[0] ** self.step_count)
            p -= self.rate * corrected / (torch.sqrt(v / (1 - self.betas[1] ** self.step_count)) + 1e-8)
