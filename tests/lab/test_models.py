"""The networks are those of the protocol."""

from __future__ import annotations

import pytest
import torch

from adabayes.lab import models


@pytest.mark.parametrize(
    ("name", "classes", "weights"),
    [
        ("resnet34", 10, 21_282_122),
        ("resnet34", 100, 21_282_122 + 90 * 513),
        ("densenet121", 10, 6_956_298),
        ("densenet121", 100, 6_956_298 + 90 * 1025),
    ],
)
def test_networks_have_the_sizes_that_the_protocol_states(name: str, classes: int, weights: int) -> None:
    assert sum(p.numel() for p in models.make(name, classes=classes).parameters()) == weights


@pytest.mark.parametrize("name", ["resnet8", "resnet20", "resnet34", "densenet121"])
def test_networks_take_images_of_any_usual_size(name: str) -> None:
    small = {"width": 4} if "resnet" in name else {"growth": 4}
    model = models.make(name, classes=7, channels=1, **small).eval()
    for side in (8, 28, 32):
        assert model(torch.zeros(2, 1, side, side)).shape == (2, 7)


def test_resnet_has_the_blocks_and_the_width_that_it_is_given() -> None:
    model = models.ResNet((1, 2), width=8)
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) == 1 + 2 * 3 + 1  # stem, blocks, and the projection where the width doubles
    assert model.head.in_features == 16


def test_the_transformer_does_not_see_later_characters() -> None:
    torch.manual_seed(0)
    model = models.make("transformer", context=16, width=32, layers=2).eval()
    text = torch.randint(128, (1, 16))
    changed = text.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 128
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[0, :9], after[0, :9], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(before[0, 9:], after[0, 9:])


def test_unknown_models_and_options_are_named() -> None:
    with pytest.raises(ValueError, match="unknown model 'vgg'; there are resnet8, resnet20"):
        models.make("vgg")
    with pytest.raises(ValueError, match=r"resnet8.*'depth'"):
        models.make("resnet8", depth=3)


@pytest.mark.parametrize("inputs", [1, 4, 7, 8, 16])
def test_a_projection_is_a_convolution_with_a_stride(inputs: int) -> None:
    torch.manual_seed(0)
    projection = models._Projection(inputs, 8, 2)
    x = torch.randn(3, inputs, 7, 6)
    expected = torch.nn.functional.conv2d(x, projection.weight, stride=2)
    torch.testing.assert_close(projection(x), expected, rtol=1e-5, atol=1e-6)
    assert list(projection.state_dict()) == ["weight"]
