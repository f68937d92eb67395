"""Augmentation: equal to kornia pixel by pixel where given its parameters, and equal to it in distribution."""

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from scipy.stats import ks_2samp

from dipole.vision import augment as A
from dipole.vision import image_ops as O

SIZE = 32


def images(n=64, channels=3, size=SIZE, seed=0):
    return torch.rand(n, channels, size, size, generator=torch.Generator().manual_seed(seed))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def neutral(n, size=SIZE):
    one, zero = torch.ones(n), torch.zeros(n)
    box = torch.tensor([0.0, 0, size, size]).expand(n, 4)
    return A.Parameters(box, zero, one, one, one, zero, zero, zero, zero, (0, 1, 2, 3))


@pytest.fixture(scope="module")
def kornia():
    return pytest.importorskip("kornia.augmentation")


def test_neutral_parameters_change_nothing():
    x = images()
    config = A.AugmentConfig(blur=1.0)
    torch.testing.assert_close(A.Augmentation(config).apply(x, neutral(len(x))), x, atol=2e-6, rtol=0)


def test_colour_jitter_equals_kornia(kornia):
    x = images()
    for seed in range(4):
        torch.manual_seed(seed)
        jitter = kornia.ColorJitter(0.4, 0.4, 0.4, 0.4)
        expected = jitter(x)
        p = jitter._params
        factors = {name: p[f"{name}_factor"] for name in ("brightness", "contrast", "saturation", "hue")}
        ours = replace(neutral(len(x)), **factors, order=tuple(p["order"].tolist()))
        torch.testing.assert_close(A.color_jitter_(x.clone(), ours), expected, atol=1e-5, rtol=0)


def test_hue_of_primary_and_grey_pixels():
    x = torch.zeros(1, 3, 4, 4)
    x[0, :, 0, 0] = torch.tensor([1.0, 0, 0])
    x[0, :, 0, 1] = torch.tensor([0.0, 1, 1])
    x[0, :, 0, 2] = torch.tensor([0.3, 0.3, 0.3])
    turned = O.adjust_hue_(x.clone(), torch.tensor([1 / 3]))
    torch.testing.assert_close(turned[0, :, 0, 0], torch.tensor([0.0, 1, 0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(turned[0, :, 0, 1], torch.tensor([1.0, 0, 1]), atol=1e-6, rtol=0)
    torch.testing.assert_close(turned[0, :, 0, 2], torch.tensor([0.3, 0.3, 0.3]))


def test_crop_and_grey_equal_kornia(kornia):
    x = images()
    crop = kornia.RandomResizedCrop((SIZE, SIZE), scale=(0.2, 1.0), align_corners=False)
    expected = crop(x)
    corner = crop._params["src"]
    extent = corner[:, 2] - corner[:, 0] + 1
    box = torch.stack([corner[:, 0, 1], corner[:, 0, 0], extent[:, 1], extent[:, 0]], 1)
    torch.testing.assert_close(O.resized_crop(x, box, SIZE), expected, atol=1e-5, rtol=0)
    x = images()
    ours = A.Augmentation(A.AugmentConfig()).apply(x, replace(neutral(len(x)), grey=torch.ones(len(x))))
    torch.testing.assert_close(ours, kornia.RandomGrayscale(p=1.0)(x), atol=1e-5, rtol=0)


def test_crops_shrink_and_flip_as_torch_does():
    x = images(4, size=48)
    box = torch.tensor([[3.0, 5, 40, 36]]).expand(4, 4)
    cut, how = x[:, :, 3:43, 5:41], {"mode": "bilinear", "align_corners": False, "antialias": True}
    expected = torch.nn.functional.interpolate(cut, (16, 16), **how)
    torch.testing.assert_close(O.resized_crop(x, box, 16), expected, atol=1e-5, rtol=0)
    x = images(2)
    box = torch.tensor([[4.0, 2, 20, 25]]).expand(2, 4)
    plain = O.resized_crop(x, box, 24)
    flipped = O.resized_crop(x, box, 24, torch.tensor([1.0, 0]))
    torch.testing.assert_close(flipped[0], plain[0].flip(-1))
    torch.testing.assert_close(flipped[1], plain[1])
    x = images(3, size=32)[:, :, :, :24]
    torch.testing.assert_close(O.centre(x, 24), x[:, :, 4:28, :])
    assert O.centre((x * 255).byte(), 12).shape == (3, 3, 12, 12)


@pytest.mark.parametrize("kernel", [3, 9])
def test_blur_equals_kornia(kornia, kernel):
    x = images()
    blur = kornia.RandomGaussianBlur((kernel, kernel), (0.1, 2.0), p=1.0)
    expected = blur(x)
    torch.testing.assert_close(O.gaussian_blur(x, blur._params["sigma"], kernel), expected, atol=1e-5, rtol=0)


def same_distribution(a, b, level=1e-3):
    return ks_2samp(a.numpy(), b.numpy()).pvalue > level


def test_parameters_are_distributed_as_kornias(kornia):
    n = 4000
    torch.manual_seed(0)
    x = torch.rand(n, 3, 8, 8)
    config = A.AugmentConfig(blur=0.5)
    ours = A.Augmentation(config).draw(n, SIZE, SIZE, generator())
    jitter = kornia.ColorJitter(0.4, 0.4, 0.4, 0.4)
    jitter(x)
    for name in ("brightness", "contrast", "saturation", "hue"):
        assert same_distribution(getattr(ours, name), jitter._params[f"{name}_factor"]), name
    crop = kornia.RandomResizedCrop((8, 8), scale=(0.2, 1.0))
    corner = crop.forward_parameters((n, 3, SIZE, SIZE))["src"]
    extent = corner[:, 2] - corner[:, 0] + 1
    theirs = {"top": corner[:, 0, 1], "left": corner[:, 0, 0], "height": extent[:, 1], "width": extent[:, 0]}
    for column, (name, values) in enumerate(theirs.items()):
        assert same_distribution(ours.box[:, column], values), name
    assert abs(ours.flip.mean() - 0.5) < 0.03
    assert abs(ours.grey.mean() - 0.2) < 0.03
    assert abs((ours.sigma > 0).float().mean() - 0.5) < 0.03
    blur = kornia.RandomGaussianBlur((3, 3), (0.1, 2.0), p=1.0)
    blur(x)
    assert same_distribution(ours.sigma[ours.sigma > 0], blur._params["sigma"])


@pytest.mark.parametrize("operation", ["crop", "jitter", "grey", "blur"])
def test_images_are_distributed_as_kornias(kornia, operation):
    """One image many times: means and contrasts of the results have one distribution."""
    x = images(1).expand(2000, -1, -1, -1).contiguous()
    off = {"flip": 0.0, "jitter": 0.0, "grey": 0.0, "blur": 0.0, "crop_scale": (1.0, 1.0), "crop_ratio": (1.0, 1.0)}
    torch.manual_seed(1)
    crop = {"crop_scale": (0.2, 1.0), "crop_ratio": (3 / 4, 4 / 3)}
    settings, theirs = {
        "crop": (crop, kornia.RandomResizedCrop((32, 32), (0.2, 1.0), align_corners=False)),
        "jitter": ({"jitter": 1.0}, None),
        "grey": ({"grey": 0.2}, kornia.RandomGrayscale(p=0.2)),
        "blur": ({"blur": 1.0, "blur_kernel": 5}, kornia.RandomGaussianBlur((5, 5), (0.1, 2.0), p=1.0)),
    }[operation]
    config = A.AugmentConfig(**{**off, **settings})
    if theirs is None:  # the order of the operations is drawn once a call: compare over calls
        parts = list(x.split(100))
        g = generator()
        ours = torch.cat([A.Augmentation(config)(part, g) for part in parts])
        jitter = kornia.ColorJitter(0.4, 0.4, 0.4, 0.4)
        other = torch.cat([jitter(part) for part in parts])
    else:
        ours, other = A.Augmentation(config)(x, generator()), theirs(x)
    for statistic in (lambda y: y.mean((1, 2, 3)), lambda y: y.std((1, 2, 3)), lambda y: y[:, 0].mean((1, 2))):
        assert same_distribution(statistic(ours), statistic(other))


def test_every_image_has_its_own_parameters_and_the_seed_decides():
    x = images(1).expand(16, -1, -1, -1).contiguous()
    config = A.AugmentConfig(blur=0.5)
    once, again, other = (A.Augmentation(config)(x, generator(seed)) for seed in (3, 3, 4))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    assert len({tuple(image.flatten().tolist()) for image in once}) == 16


def test_the_slices_in_cache_do_not_change_the_result(monkeypatch):
    x = images(50)
    config = A.AugmentConfig(blur=0.5)
    parameters = A.Augmentation(config).draw(50, SIZE, SIZE, generator())
    whole = A.Augmentation(config).apply(x, parameters)
    monkeypatch.setattr(A, "CACHE_FLOATS", 7 * SIZE * SIZE)
    torch.testing.assert_close(A.Augmentation(config).apply(x, parameters), whole, atol=1e-6, rtol=0)


def test_bytes_single_channels_and_single_images():
    x = (images(8) * 255).byte()
    config = A.AugmentConfig()
    torch.testing.assert_close(A.Augmentation(config)(x, generator()), A.Augmentation(config)(x / 255, generator()))
    out = A.Augmentation(A.AugmentConfig(size=16, blur=1.0))(images(5, channels=1, size=8), generator())
    assert out.shape == (5, 1, 16, 16)
    assert out.min() >= 0
    assert out.max() <= 1
    augment = A.Augmentation(A.AugmentConfig(size=6, blur=0.5, solarize=0.5))
    batch = (images(1) * 255).to(torch.uint8)
    assert torch.equal(augment(batch[0], generator()), augment(batch, generator())[0])


def test_boxes_stay_inside_also_for_extreme_images():
    for height, width in ((32, 32), (10, 200), (200, 10), (4, 4)):
        augment = A.Augmentation(A.AugmentConfig(crop_scale=(0.9, 1.0)))
        box = augment.boxes(augment.draw_unsized(500, generator())[1], height, width)
        assert (box[:, :2] >= 0).all()
        assert (box[:, 2:] >= 1).all()
        assert (box[:, 0] + box[:, 2] <= height).all()
        assert (box[:, 1] + box[:, 3] <= width).all()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"crop_scale": (0.9, 0.2)}, "crop_scale must be"),
        ({"blur_kernel": 4}, "must be odd"),
        ({"hue": 0.7}, "less than or equal to 0.5"),
        ({"grey": 1.5}, "less than or equal to 1"),
    ],
)
def test_settings_out_of_range_are_refused(setting, message):
    with pytest.raises(ValidationError, match=message):
        A.AugmentConfig(**setting)
