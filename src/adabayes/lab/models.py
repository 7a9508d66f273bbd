"""Networks: ResNet and DenseNet in their CIFAR forms, as in Luo et al., and a few small ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MLP", "CharTransformer", "DenseNet", "ResNet", "TwoConvTwoDense", "make"]


class _Projection(nn.Conv2d):
    """A 1x1 convolution with a stride. With few channels, it selects the pixels itself.

    In channels_last layout and below 8 channels, oneDNN 3.12 (in torch 2.13) writes out of bounds on machines with AVX2
    but without AVX-512.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.in_channels >= 8:
            return super().forward(x)
        return F.conv2d(x[..., :: self.stride[0], :: self.stride[1]], self.weight)


class _BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_Projection(inputs, outputs, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A 3x3 stem without pooling, then stages of basic blocks, each but the first at half the size and twice the width.

    Args:
        blocks: number of blocks in each stage; (3, 4, 6, 3) is ResNet-34.
        width: channels of the first stage.
        classes: number of outputs.
        channels: channels of the image.
    """

    def __init__(self, blocks: Sequence[int], width: int = 64, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        layers: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(blocks):
            outputs = width * 2**stage
            for i in range(count):
                layers.append(_BasicBlock(inputs, outputs, stride=2 if i == 0 and stage > 0 else 1))
                inputs = outputs
        self.stages = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.bn1(x)))
        return torch.cat([self.conv2(F.relu(self.bn2(y))), x], 1)


class DenseNet(nn.Module):
    """Dense blocks of bottlenecks (4 times the growth), between them transitions that halve channels and size.

    Args:
        blocks: number of bottlenecks in each dense block; (6, 12, 24, 16) is DenseNet-121.
        growth: channels that each bottleneck adds.
        classes: number of outputs.
        channels: channels of the image.
    """

    def __init__(self, blocks: Sequence[int], growth: int = 32, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        width = 2 * growth
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False)]
        for i, count in enumerate(blocks):
            for _ in range(count):
                layers.append(_Bottleneck(width, growth))
                width += growth
            if i < len(blocks) - 1:
                layers += [
                    nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2),
                ]  # fmt: skip
                width //= 2
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))  # type: ignore[no-any-return]


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class CharTransformer(nn.Module):
    """Predicts each next character. Pre-norm and causal; the embedding is also the output layer.

    Args:
        classes: number of different characters.
        context: length of the longest text that it can see.
        width: width of the residual stream.
        layers: number of layers.
        heads: number of attention heads.
    """

    def __init__(
        self, classes: int = 128, context: int = 128, width: int = 128, layers: int = 4, heads: int = 4
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(classes, width)
        self.places = nn.Embedding(context, width)
        self.layers = nn.Sequential(*[_Layer(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.places.weight[: text.shape[1]]
        return F.linear(self.norm(self.layers(x)), self.characters.weight)


class TwoConvTwoDense(nn.Module):
    """DeepOBS's 2c2d, with its initialisation: two 5x5 convolutions, each with pooling, and two dense layers."""

    def __init__(self, classes: int = 10, channels: int = 1, size: int = 28) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.dense1 = nn.Linear(64 * (size // 4) ** 2, 1024)
        self.dense2 = nn.Linear(1024, classes)
        for module in self.children():
            nn.init.trunc_normal_(module.weight, std=0.05, a=-0.1, b=0.1)  # type: ignore[arg-type]
            nn.init.constant_(module.bias, 0.05)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for conv in (self.conv1, self.conv2):
            x = F.max_pool2d(F.relu(conv(x)), 2)
        return self.dense2(F.relu(self.dense1(x.flatten(1))))  # type: ignore[no-any-return]


class MLP(nn.Sequential):
    """Dense layers with an activation between them.

    Args:
        inputs: number of inputs.
        outputs: number of outputs.
        widths: widths of the layers between.
        activation: relu or tanh.
    """

    def __init__(self, inputs: int, outputs: int, widths: Sequence[int], activation: str = "relu") -> None:
        kinds: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}
        if activation not in kinds:
            raise ValueError(f"unknown activation {activation!r}; there are {', '.join(kinds)}")
        sizes = [inputs, *widths, outputs]
        layers: list[nn.Module] = []
        for i, (n, m) in enumerate(pairwise(sizes)):
            layers += [kinds[activation]()] if i else []
            layers.append(nn.Linear(n, m))
            # The variance stays the same from layer to layer, however many there are.
            nn.init.xavier_normal_(layers[-1].weight, gain=nn.init.calculate_gain(activation) if i else 1.0)  # type: ignore[arg-type]
            nn.init.zeros_(layers[-1].bias)  # type: ignore[arg-type]
        super().__init__(*layers)


_MODELS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "resnet8": (ResNet, {"blocks": (1, 1, 1), "width": 16}),
    "resnet20": (ResNet, {"blocks": (3, 3, 3), "width": 16}),
    "resnet34": (ResNet, {"blocks": (3, 4, 6, 3), "width": 64}),
    "densenet121": (DenseNet, {"blocks": (6, 12, 24, 16), "growth": 32}),
    "transformer": (CharTransformer, {}),
    "2c2d": (TwoConvTwoDense, {}),
    "mlp": (MLP, {"widths": (256, 256)}),
    "autoencoder": (MLP, {"widths": (256, 64, 16, 64, 256), "activation": "tanh"}),
    "pinn": (MLP, {"widths": (64, 64, 64, 64), "activation": "tanh"}),
}
NAMES = tuple(_MODELS)


def make(name: str, **options: Any) -> nn.Module:
    """Make a network by name. Options replace its usual ones.

    >>> sum(p.numel() for p in make("resnet8", classes=10).parameters())
    78042
    """
    if name not in _MODELS:
        raise ValueError(f"unknown model {name!r}; there are {', '.join(_MODELS)}")
    build, defaults = _MODELS[name]
    try:
        return build(**{**defaults, **options})
    except TypeError as error:
        raise ValueError(f"model {name!r} with {options}: {error}") from error
