"""AdaBayes-K in a Hydra app: the optimizer is what the YAML file says, with any argument set on the command line.

    python examples/hydra_app.py [optimizer.lr=0.01] [optimizer._target_=torch.optim.AdamW]

``instantiate`` gets the parameters; everything else is in ``configs/hydra.yaml``. Prints the settings and the test
error. Ten seconds on two cores, no download.
"""

from __future__ import annotations

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy


@hydra.main(version_base="1.3", config_path="configs", config_name="hydra")
def main(config: DictConfig) -> None:
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = instantiate(config.optimizer, model.parameters())
    print(type(optimizer).__name__, OmegaConf.to_container(config.optimizer))
    for _ in range(config.epochs):
        for batch in torch.randperm(len(x) - 360).split(128):  # the last 360 are the test
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    error = (model(x[-360:]).argmax(1) != y[-360:]).double().mean()
    print(f"test error {100 * error:.2f} %")


if __name__ == "__main__":
    main()
