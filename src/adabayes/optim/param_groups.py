"""Parameter groups for weight decay, stacks of matrices and fused projections."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from adabayes._blocks.blocks import check_block_size
from adabayes._util.checks import check_integer

__all__ = ["param_groups"]


def param_groups(
    model: nn.Module, weight_decay: float | None = None, *, block_size: int | tuple[int, int] = 128
) -> list[dict[str, Any]]:
    """Return parameter groups for any optimizer of torch: by weight decay, and by how AdaBayes-K sees their matrices.

    - Matrices, convolutions and embeddings decay; biases, the weights of norms and everything with fewer than two
      dimensions do not.
    - A parameter with three dimensions that belongs to no convolution is a stack of matrices, such as experts of shape
      ``E x out x in``: its group has ``batch_dims=1``, and AdaBayes-K rotates each matrix by itself.
    - The fused projection of ``nn.MultiheadAttention`` is cut into queries, keys and values, and between heads: its
      group has a ``block_size`` whose blocks hold one or several complete heads, or an equal part of a large one.

    Other optimizers ignore both settings. Frozen parameters are left out, tied ones counted once. Names are kept, for
    tables and checkpoints.

    Args:
        model: the model.
        weight_decay: weight decay of the parameters that decay; the others get 0. None: parameters are not split, and
            the optimizer's own weight decay is that of all.
        block_size: as given to the optimizer.

    Examples:
        >>> from adabayes import AdaBayes
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2, bias=False))
        >>> optimizer = AdaBayes(param_groups(model, weight_decay=0.05), lr=1e-3)
        >>> [(group["param_names"], group["weight_decay"]) for group in optimizer.param_groups]
        [(['0.weight', '2.weight'], 0.05), (['0.bias', '1.weight', '1.bias'], 0.0)]
        >>> attention = nn.MultiheadAttention(embed_dim=192, num_heads=3)
        >>> [(group["block_size"], [name for name, _ in group["params"]]) for group in param_groups(attention)[:1]]
        [((64, 128), ['in_proj_weight'])]
    """
    block_size = check_block_size(block_size, check_integer)
    groups: dict[Any, dict[str, Any]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            module = _owner(model, name)
            decays = weight_decay is not None and _decays(module, name, p)
            settings = _matrix_settings(module, name, p, block_size)
            if weight_decay is not None:
                settings["weight_decay"] = weight_decay if decays else 0.0
            key = (not decays, *settings.items())
            groups.setdefault(key, {"params": [], **settings})["params"].append((name, p))
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]  # parameters that decay come first


def _owner(model: nn.Module, name: str) -> nn.Module:
    """Return the module that uses a parameter; of a parametrization, the module whose parameter it computes."""
    path, is_parametrized, _ = f".{name}".partition(".parametrizations.")
    return model.get_submodule((path if is_parametrized else path.rpartition(".")[0])[1:])


def _decays(module: nn.Module, name: str, p: Tensor) -> bool:
    return p.dim() >= 2 and not isinstance(module, nn.LayerNorm | nn.RMSNorm) and not _is_bias(name)


def _is_bias(name: str) -> bool:
    return "bias" in name.rpartition(".")[2]


def _matrix_settings(module: nn.Module, name: str, p: Tensor, block_size: int | tuple[int, int]) -> dict[str, Any]:
    """Return the settings of AdaBayes-K that follow from the module of a parameter."""
    if isinstance(module, nn.MultiheadAttention) and name.rpartition(".")[2] == "in_proj_weight":
        height, width = block_size if isinstance(block_size, tuple) else (block_size, block_size)
        return {"block_size": (_height_of_heads(module.num_heads, module.head_dim, height), width)}
    is_elementwise = isinstance(module, nn.LayerNorm | nn.RMSNorm) or _is_bias(name)
    if p.dim() == 3 and not (is_elementwise or isinstance(module, _ConvNd)):
        return {"batch_dims": 1}
    return {}


def _height_of_heads(num_heads: int, head_dim: int, most: int) -> int:
    """Return the height of blocks that hold as many complete heads as fit, or an equal part of a head that does not.

    A head that has no large equal parts, because its size is nearly a prime number, is not cut.

    >>> [_height_of_heads(*heads, most=128) for heads in ((12, 64), (3, 64), (4, 256), (2, 131))]
    [128, 64, 128, 131]
    """
    if head_dim <= most:
        return head_dim * max(i for i in range(1, num_heads + 1) if num_heads % i == 0 and i * head_dim <= most)
    part = max(i for i in range(1, most + 1) if head_dim % i == 0)
    return part if 2 * part >= most else head_dim
