"""Imports an installed adabayes and trains with each optimizer: ``python smoke.py [--kernels]``.

With ``--kernels`` the fused kernels must be there, without it they must not. For tests of wheels, here and in the
release workflow: it needs torch and adabayes, and nothing of this folder.
"""

from __future__ import annotations

import sys

import torch

import adabayes
from adabayes.kernels.cpu import library


def main(built: bool) -> None:
    assert (library.unavailable() is None) == built, library.unavailable()
    x = torch.randn(64, 8)
    for cls in (adabayes.AdaBayes, adabayes.AdaBayesFP, adabayes.AdaBayesK):
        model = torch.nn.Linear(8, 2)
        optimizer = cls(model.parameters(), lr=1e-2, fused=True if built else None)
        losses = []
        for _ in range(20):
            loss = torch.nn.functional.mse_loss(model(x), x[:, :2])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0], (cls, losses)
    print(adabayes.__version__, adabayes.__file__)


if __name__ == "__main__":
    main("--kernels" in sys.argv)
